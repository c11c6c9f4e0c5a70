"""The copy of a piece that another rank holds alone, for models that are sharded on one dimension of a mesh.

No rank holds the same piece there, so a lost one would cost all steps since the last copy or checkpoint. With
`replica: buddy` in the policy each rank also keeps the piece of the rank one node back, and repeats its updates
(`adapters/buddies.py`). The copy has plain tensors where its owner has pieces of DTensors, of the same shapes; whatever
does not belong to a piece, such as learning rates, is the same on all ranks and taken from this one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ...processor import tree
from ...processor.optimizer_state import OptimizerState, is_plain
from ...processor.registry import Registry
from ...processor.shard import Shard
from ...processor.shard_layout import Extent
from ...protocol.errors import ConfigurationError
from .compatibility import place_of
from .shards import ELEMENTWISE, ByModule, Piece, local

_ALIGNED_BYTES = 16  # of the largest element that a gradient may have
_PARAMS = "params"


class PieceCopy(Piece):
    """The copy of the piece of `rank`. It is not there before it has been adopted once."""

    def __init__(self, rank: int, own: ByModule, registry: Registry, synced_buffers: frozenset[str]) -> None:
        """`own`: the parameters of this rank's own piece, as they are registered with the optimizers."""
        super().__init__((rank,), own, registry, synced_buffers)
        self._copies: ByModule = {
            name: {path: _room(each, rank) for path, each in named.items()} for name, named in own.items()
        }
        copy_of = {id(each): self._copies[name][path] for name, named in own.items() for path, each in named.items()}
        self._states = {
            name: _CopiedOptimizer(name, optimizer, copy_of) for name, optimizer in registry.optimizers.items()
        }
        self._optimizers = self._states
        self._own = [each for named in own.values() for each in named.values()]
        self._flat = [each for named in self._copies.values() for each in named.values()]
        self.device = local(self._own[0]).device
        self.held = False
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # gradients by their parameter, and their version
        self._gradients: dict[int, torch.Tensor] = {}  # by the copy of their parameter
        self._updated: set[str] = set()  # optimizers, in this step

    def versions(self) -> int:
        """Return 0: the copy changes in updates, and is no parameter of the script."""
        return 0

    def extent_of(self, parameter: torch.Tensor, also: tuple[str, ...]) -> Extent:
        """Return where the owner's piece of a parameter lies in the whole of it."""
        _, offsets = place_of(parameter, self.writer)
        return Extent(tuple(parameter.shape), offsets, sharded=True, also=also)

    def adopt(self, shard: Shard) -> None:
        """Make the received piece the copy."""
        self.adopt_own(tree.unflatten(shard.header, shard.tensors))
        self.held = True

    # --- for the ring of buddies: UpdatedCopy -------------------------------------------------------------------------

    @property
    def arriving_bytes(self) -> int:
        """The size of the message that the owner sends in each step."""
        return _mask_bytes(self._flat) + sum(each.nbytes for each in self._flat)

    @property
    def sent_bytes(self) -> int:
        """The size of the message that this rank sends in each step."""
        sizes: list[int] = [local(each).nbytes for each in self._own]
        return _mask_bytes(self._own) + sum(sizes)

    def message(self) -> list[torch.Tensor]:
        """Return which parameters of this rank's own piece have gradients, and these."""
        self._sent = {
            id(each): (gradient, gradient._version) for each in self._own if (gradient := local(each.grad)) is not None
        }
        mask = torch.zeros(_mask_bytes(self._own), dtype=torch.uint8, device="cpu")
        sent = [id(each) in self._sent for each in self._own]
        mask[: len(self._own)] = torch.tensor(sent, dtype=torch.uint8, device="cpu")
        parts = [mask.to(self.device)]
        for each in self._own:
            gradient = self._sent[id(each)][0] if id(each) in self._sent else torch.zeros_like(local(each))
            parts.append(gradient.detach().reshape(-1).view(torch.uint8))
        return parts

    def take(self, message: torch.Tensor) -> None:
        """Keep the owner's gradients of this step until `update` or `forget`."""
        sizes = [_mask_bytes(self._flat), *(each.nbytes for each in self._flat)]
        mask, *pieces = torch.split(message, sizes)
        there = mask[: len(self._flat)].tolist()
        self._updated.clear()
        self._gradients = {
            id(each): _aligned(piece, each.element_size()).view(each.dtype).view_as(each)
            for each, piece, is_there in zip(self._flat, pieces, there, strict=True)
            if is_there
        }

    def update(self, name: str) -> bool:
        """Apply the owner's update of one optimizer, right before this rank's own. Return whether all are applied.

        Raises ConfigurationError if the script has changed its gradients since they were sent.
        """
        state = self._states[name]
        for parameter in state.parameters():
            if id(parameter) in self._sent and not _is_same(parameter, self._sent[id(parameter)]):
                raise ConfigurationError(
                    f"replica: buddy, and gradients of {name} are changed inside `with step.update():`, when another "
                    "rank has them already. Clip and scale them before that block"
                )
        state.update(self._gradients)
        self._updated.add(name)
        over = self._updated == self._states.keys()
        if over:
            self.forget()
        return over

    def refuse_second(self, name: str) -> None:
        """Raise ConfigurationError where an optimizer steps twice in one update: its gradients are gone."""
        if name in self._updated:
            raise ConfigurationError(
                f"replica: buddy, and {name} steps twice in one update block: a copy repeats one update in a step. "
                "Step once, or leave `replica` out of the policy"
            )

    def forget(self) -> None:
        """Drop the gradients of a step that is over or is rolled back."""
        self._gradients, self._sent = {}, {}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _parameters(self) -> ByModule:
        return self._copies


class _CopiedOptimizer(OptimizerState):
    """The copy of an optimizer: of the same kind, with plain tensors in the places of the pieces of DTensors."""

    def __init__(self, name: str, own: torch.optim.Optimizer, copy_of: Mapping[int, torch.Tensor]) -> None:
        self._own = own
        kind: Any = type(own)
        groups = [
            {**_scalars(group), _PARAMS: [copy_of.get(id(each), torch.empty(0)) for each in group[_PARAMS]]}
            for group in own.param_groups
        ]
        super().__init__(name, kind(groups))

    def collect(self) -> dict[str, Any]:
        """Return the state as its owner does."""
        content, parameters = super().collect(), self._parameters()
        sharded = [
            (position, key)
            for position, entries in content["state"].items()
            for key, value in entries.items()
            if isinstance(value, torch.Tensor) and value.shape == parameters[position].shape
        ]
        # A scheduler sets this rank's own rates after the update.
        return {**content, "groups": [_scalars(group) for group in self._own.param_groups], "sharded": sharded}

    def parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters of this rank's own optimizer."""
        return [each for group in self._own.param_groups for each in group[_PARAMS]]

    def update(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Apply an update at the rates that this rank's own one will have."""
        for group, own in zip(self._optimizer.param_groups, self._own.param_groups, strict=True):
            group.update(_scalars(own))
        for parameter in self._parameters():
            parameter.grad = gradients.get(id(parameter))
        self._optimizer.step()
        for parameter in self._parameters():
            parameter.grad = None


def refuse_unrepeatable(registry: Registry, own: Piece) -> None:
    """Refuse, in one error, what keeps another rank from repeating this rank's updates.

    Raises:
        ConfigurationError: The text names all of it.
    """
    found = [
        f"{name} is a {type(each).__name__}, which may do more than arithmetic on elements"
        for name, each in registry.optimizers.items()
        if type(each) not in ELEMENTWISE or not is_plain(each)
    ]
    found += [f"{name} scales gradients within an update" for name in registry.scalers]
    if len(own.mesh_ranks) < 2:
        ranks = ", ".join(map(str, own.mesh_ranks)) or "none"
        found.append(f"the ranks that all meshes of its parameters have in common are too few: {ranks}")
    if found:
        raise ConfigurationError(
            f"replica: buddy in the policy: another rank cannot repeat this one's updates, as {'; '.join(found)}. "
            "Leave `replica` out, and take copies in host memory instead: restore: [replica, host_copy, checkpoint]"
        )


def hook_updates(registry: Registry, call: Callable[[str], None]) -> None:
    """Call `call` with the name of an optimizer right before each of its steps."""
    for name, optimizer in registry.optimizers.items():
        optimizer.register_step_pre_hook(lambda *_, name=name: call(name))


def _room(parameter: torch.Tensor, rank: int) -> torch.Tensor:
    shape, _ = place_of(parameter, rank)
    piece: torch.Tensor = local(parameter)
    return torch.zeros(shape, dtype=piece.dtype, device=piece.device)


def _scalars(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != _PARAMS}


def _mask_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return -(-sum(1 for _ in parameters) // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _aligned(piece: torch.Tensor, element_bytes: int) -> torch.Tensor:
    return piece if piece.storage_offset() % element_bytes == 0 else piece.clone()


def _is_same(parameter: torch.Tensor, sent: tuple[torch.Tensor, int]) -> bool:
    gradient = local(parameter.grad)
    return gradient is sent[0] and gradient._version == sent[1]
