"""An optimizer's state as a plain structure, and back, without the copies and casts of `load_state_dict`.

torch's own `load_state_dict` copies everything and casts floating point state to the dtype of its parameter. Here the
tensors that arrived become the state themselves. An optimizer that brings its own `state_dict` is asked by it instead.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ..protocol.errors import RecoveryError
from . import tree

_PARAMS = "params"


class OptimizerState:
    """The state of one optimizer; parameters are named by their position over all param groups."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = name
        self._optimizer = optimizer

    def collect(self) -> dict[str, Any]:
        """Return the state as a plain structure of live objects. At a source."""
        optimizer = self._optimizer
        if not is_plain(optimizer):
            return {"plain": False, "whole": optimizer.state_dict()}
        positions = {id(parameter): index for index, parameter in enumerate(self._parameters())}
        strangers = [key for key in optimizer.state if id(key) not in positions]
        if strangers:
            return {"plain": False, "whole": optimizer.state_dict()}
        ordered = sorted(optimizer.state.items(), key=lambda item: positions[id(item[0])])
        state = {positions[id(parameter)]: dict(entries) for parameter, entries in ordered}
        elsewhere = [
            (positions[id(parameter)], key)
            for parameter, entries in ordered
            for key, value in entries.items()
            if isinstance(value, torch.Tensor) and value.device != parameter.device
        ]
        groups = [{key: value for key, value in group.items() if key != _PARAMS} for group in optimizer.param_groups]
        return {"plain": True, "state": state, "on_host": elsewhere, "groups": groups}

    def targets(
        self, outline: dict[str, Any]
    ) -> Iterator[tuple[str, tree.TensorSlot, torch.Tensor | None, torch.device]]:
        """Yield where arriving state belongs: place, slot, live tensor if there is one, device. At a destination."""
        if not outline["plain"]:
            return
        parameters = self._parameters()
        on_host = set(outline["on_host"])
        for position, entries in outline["state"].items():
            if position >= len(parameters):
                raise RecoveryError(
                    f"{self._name}: state for parameter {position} arrives, but there are {len(parameters)} here; do "
                    "all ranks build the same optimizer?"
                )
            parameter = parameters[position]
            held: dict[str, Any] = self._entries(parameter)
            for key, slot in entries.items():
                if not isinstance(slot, tree.TensorSlot):
                    continue
                live = held.get(key)
                fits = isinstance(live, torch.Tensor) and live.shape == slot.shape and live.dtype == slot.dtype
                device = torch.device("cpu") if (position, key) in on_host else parameter.device
                yield (
                    f"{self._name}.state[{position}].{key}",
                    slot,
                    live.detach() if live is not None and fits else None,
                    device,
                )

    def adopt(self, content: dict[str, Any]) -> None:
        """Make what arrived the state. At a destination."""
        optimizer = self._optimizer
        if not content["plain"]:
            optimizer.load_state_dict(content["whole"])
            return
        if len(content["groups"]) != len(optimizer.param_groups):
            raise RecoveryError(
                f"{self._name}: {len(content['groups'])} param groups arrive, {len(optimizer.param_groups)} are here; "
                "do all ranks build the same optimizer?"
            )
        self._take(content)
        for group, arrived in zip(optimizer.param_groups, content["groups"], strict=True):
            for key, value in arrived.items():
                live = group.get(key)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                    live.data.copy_(value)  # a scheduler may hold on to it
                else:
                    group[key] = value

    def _entries(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return what is kept for a parameter, as tensors that can receive."""
        entries: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return entries

    def _take(self, content: dict[str, Any]) -> None:
        """Keep what arrived, and nothing else."""
        optimizer, parameters = self._optimizer, self._parameters()
        optimizer.state.clear()
        for position, entries in content["state"].items():
            optimizer.state[parameters[position]] = entries

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group[_PARAMS]]


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's state is what torch's own `state_dict` says, with no method or hook of its own."""
    kind, base = type(optimizer), torch.optim.Optimizer
    own_methods = kind.state_dict is not base.state_dict or kind.load_state_dict is not base.load_state_dict
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
             "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")  # fmt: skip
    return not own_methods and not any(getattr(optimizer, hook, None) for hook in hooks)
