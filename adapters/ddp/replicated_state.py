"""The replicated shard of a plain PyTorch script: opened at a source, received and adopted at a destination."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...processor import tree
from ...processor.optimizer_state import OptimizerState, is_plain
from ...processor.prefault import PrefaultedMemory, aligned
from ...processor.registry import Registry
from ...processor.shard import Shard
from ...processor.shard_layout import Extent, ShardLayout
from ...processor.whole_state import SHARD_ID
from ...protocol.errors import ConfigurationError, RecoveryError

ENTRIES = 8  # tensors that optimizers keep for each parameter; with more of them the last ones are allocated late


class ReplicatedState:
    """The replicated shard of a registry: parameters, optimizer state and all else that is the same on every rank.

    A source opens its live tensors, uncopied. A destination receives into its live tensors where they fit, so that
    every handle on a parameter stays valid and a survivor needs no second copy; what does not exist yet (a newcomer's
    optimizer state) is allocated and then becomes the live state without another copy. From `accept` until `adopt` the
    state of this rank is therefore neither the old one nor the new one.

    `optimizers`: what reads and takes the state of each optimizer, where that is not the state as a whole.
    `synced_buffers` names the modules whose buffers were made equal at start (by DDP): their contents then travel
    along, as a newcomer cannot know them if they were drawn at random.
    """

    def __init__(
        self,
        registry: Registry,
        synced_buffers: frozenset[str],
        optimizers: Mapping[str, OptimizerState] | None = None,
    ) -> None:
        self._registry = registry
        self._synced = synced_buffers
        own = {name: OptimizerState(name, each) for name, each in registry.optimizers.items()}
        self._optimizers = own if optimizers is None else optimizers
        self._room: PrefaultedMemory | None = None  # from `expect` until `adopt`

    def layout(self) -> ShardLayout:
        """Return what the tensors of this shard are called outside of midstep, and where its pieces lie in them.

        Raises ConfigurationError for optimizer state that has no such names.
        """
        modules = self._registry.modules
        every = [
            (each, (name, path))
            for name, module in modules.items()
            for path, each in module.named_parameters(remove_duplicate=False)
        ]
        names: dict[int, list[tuple[str, str]]] = {}
        for each, place in every:
            names.setdefault(id(each), []).append(place)
        parameters = {
            name: {path: self.extent_of(each, tuple(other for module, other in names[id(each)][1:] if module == name))
                   for path, each in named.items()}
            for name, named in self._registered().items()
        }  # fmt: skip
        optimizers = {
            name: [[_named(name, each, names) for each in group["params"]] for group in optimizer.param_groups]
            for name, optimizer in self._registry.optimizers.items()
        }
        for name, optimizer in self._registry.optimizers.items():
            if not is_plain(optimizer):
                raise ConfigurationError(
                    f"checkpoint.format: dcp names an optimizer's state by its parameters, and {name} has a state_dict "
                    "of its own. Leave the format as it is: safetensors"
                )
        return ShardLayout(parameters, optimizers)

    def extent_of(self, parameter: torch.Tensor, also: tuple[str, ...]) -> Extent:
        """Return where this rank's piece of a parameter lies in the whole of it."""
        return Extent(tuple(parameter.shape), (0,) * parameter.ndim, also=also)

    def open(self) -> Shard:
        """Open this rank's state as a source. Raises UnsupportedState for what cannot be carried."""
        content = {
            "parameters": {
                name: {path: parameter.detach() for path, parameter in named.items()}
                for name, named in self._parameters().items()
            },
            "baseline": self._baseline(),
            "optimizers": {name: state.collect() for name, state in self._optimizers.items()},
            "small": self._registry.small_replicated(),
        }
        skeleton, tensors = tree.flatten(content, SHARD_ID)
        return Shard(skeleton, [tensor.contiguous() for tensor in tensors])

    def expect(self, size_bytes: int) -> None:
        """Start to allocate memory for a shard of `size_bytes`, less what live tensors can receive."""
        parameters = [parameter for named in self._parameters().values() for parameter in named.values()]
        if all(parameter.device.type == "cpu" for parameter in parameters):
            lacking = max(0, size_bytes - self.open().size_bytes)
            # Each tensor begins at a round address; how many there will be is not known yet.
            self._take_room(lacking + ENTRIES * len(parameters) * aligned(1) if lacking else 0)

    def accept(self, header: bytes) -> Shard:
        """Return the tensors that receive a shard. Raises RecoveryError when it does not fit this rank's modules."""
        slots, outline = tree.slots_and_outline(header)
        tensors: list[torch.Tensor | None] = [None] * len(slots)
        fresh: list[tree.TensorSlot] = []
        for place, slot, live, device in self._targets(outline):
            if live is not None and (live.shape != slot.shape or live.dtype != slot.dtype):
                raise RecoveryError(
                    f"{place} arrives as {slot.dtype} {list(slot.shape)}, but here it is {live.dtype} "
                    f"{list(live.shape)}; do all ranks build the same model?"
                )
            if live is not None and live.is_contiguous():
                tensors[slot.index] = live
            elif device.type == "cpu":
                fresh.append(slot)
            else:
                tensors[slot.index] = torch.empty(slot.shape, dtype=slot.dtype, device=device)
        needed = sum(aligned(slot.size_bytes) for slot in fresh)
        if self._room is None or self._room.size_bytes < needed:
            self._take_room(needed)
        assert self._room is not None
        for slot in fresh:
            tensors[slot.index] = self._room.empty(slot.shape, slot.dtype)
        filled = [
            torch.empty(slot.shape, dtype=slot.dtype, device="cpu") if tensor is None else tensor
            for slot, tensor in zip(slots, tensors, strict=True)
        ]
        return Shard(header, filled)

    def adopt(self, shard: Shard) -> None:
        """Make an accepted shard, now received, the state of this rank."""
        content = tree.unflatten(shard.header, shard.tensors)
        self._registry.buffers.adopt_baseline(content["baseline"])
        self._registry.adopt_small_replicated(content["small"])
        self.adopt_own(content)

    def adopt_own(self, content: dict[str, Any]) -> None:
        """Make received parameters and optimizer state those of this shard. The rest is the same on all ranks."""
        for name, named in self._parameters().items():
            for path, parameter in named.items():
                arrived = content["parameters"][name][path]
                if arrived.data_ptr() != parameter.data_ptr():
                    parameter.data.copy_(arrived)
        for name, state in self._optimizers.items():
            state.adopt(content["optimizers"][name])
        self._leave_room()

    def _registered(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the parameters of this shard, as they are registered with the optimizers."""
        return {name: dict(module.named_parameters()) for name, module in self._registry.modules.items()}

    def _parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the live tensors of parameters, by module and name."""
        return self._registered()

    def _take_room(self, size_bytes: int) -> None:
        self._leave_room()
        self._room = PrefaultedMemory(size_bytes)

    def _leave_room(self) -> None:
        if self._room is not None:
            self._room.close()
        self._room = None

    def _baseline(self) -> dict[str, torch.Tensor]:
        return {
            path: tensor
            for path, tensor in self._registry.buffers.baseline().items()
            if any(path.startswith(f"{name}.") for name in self._synced)
        }

    def _targets(
        self, outline: dict[str, Any]
    ) -> Iterator[tuple[str, tree.TensorSlot, torch.Tensor | None, torch.device]]:
        """Yield where each arriving tensor of modules and optimizers belongs: place, slot, live tensor, device."""
        modules = self._parameters()
        _require_same("modules", outline["parameters"], modules)
        _require_same("optimizers", outline["optimizers"], self._optimizers)
        for name, live in modules.items():
            _require_same(f"parameters of {name}", outline["parameters"][name], live)
            for path, slot in outline["parameters"][name].items():
                yield f"{name}.{path}", slot, live[path].data, live[path].device
        for name, state in self._optimizers.items():
            yield from state.targets(outline["optimizers"][name])


def _require_same(kind: str, arrived: dict[str, Any], here: Mapping[str, Any]) -> None:
    if arrived.keys() != here.keys():
        only_there = sorted(arrived.keys() - here.keys())[:3]
        only_here = sorted(here.keys() - arrived.keys())[:3]
        raise RecoveryError(
            f"{kind} differ between ranks: only at the source {only_there}, only here {only_here}; do all ranks run "
            "the same script?"
        )


def _named(optimizer: str, parameter: torch.Tensor, names: Mapping[int, list[tuple[str, str]]]) -> tuple[str, str]:
    found = names.get(id(parameter))
    if found is None:
        raise ConfigurationError(
            f"checkpoint.format: dcp names an optimizer's state by its parameters, and {optimizer} has one of no "
            "registered module. Register its module with the train state"
        )
    return found[0]
