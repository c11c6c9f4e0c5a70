"""Optimizer state of sharded parameters, as this rank's pieces of it."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...processor.optimizer_state import OptimizerState
from ...protocol.errors import UnsupportedState


def local(tensor: Any) -> Any:
    """Return this rank's piece of a sharded tensor, not copied; anything else as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class ShardedOptimizerState(OptimizerState):
    """The pieces that an optimizer keeps for the parameters of one shard. The optimizer may have others, too.

    Moments are sharded as their parameter is, and travel as plain tensors. Parameters are named by their position.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        super().__init__(name, optimizer)
        self._ids = {id(parameter) for parameter in parameters}

    def collect(self) -> dict[str, Any]:
        """Return the pieces as a plain structure of live tensors. Raises UnsupportedState for one cut otherwise."""
        content, parameters = super().collect(), self._parameters()
        state: dict[int, dict[str, Any]] = {}
        sharded: list[tuple[int, str]] = []
        for position, entries in content["state"].items():
            parameter = parameters[position]
            if id(parameter) not in self._ids:
                continue
            state[position] = {key: local(value) for key, value in entries.items()}
            for key, value in entries.items():
                if isinstance(value, DTensor):
                    self._check_cut(parameter, value, f"state[{position}].{key}")
                    sharded.append((position, key))
        on_host = [place for place in content["on_host"] if place[0] in state]
        return {**content, "state": state, "on_host": on_host, "sharded": sharded}

    def _check_cut(self, parameter: torch.Tensor, value: DTensor, place: str) -> None:
        same_cut = isinstance(parameter, DTensor) and value.placements == parameter.placements
        if not same_cut or value.shape != parameter.shape:
            raise UnsupportedState(
                f"{self._name}.{place} is sharded as {value.placements} with shape {list(value.shape)}, unlike its "
                "parameter; only state that is cut as its parameter can be carried"
            )

    def _entries(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {key: local(value) for key, value in super()._entries(parameter).items()}

    def _take(self, content: dict[str, Any]) -> None:
        kept, parameters = self._optimizer.state, self._parameters()
        sharded = set(map(tuple, content["sharded"]))
        for parameter in parameters:
            if id(parameter) in self._ids:
                kept.pop(parameter, None)
        for position, entries in content["state"].items():
            parameter = parameters[position]
            kept[parameter] = {
                key: _as_sharded(parameter, value) if (position, key) in sharded else value
                for key, value in entries.items()
            }


def _as_sharded(parameter: Any, piece: torch.Tensor) -> DTensor:
    """Return a piece as a tensor that is sharded like its parameter. No collective."""
    sharded: DTensor = DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded
