"""The train state of a plain PyTorch script, and how a recovery captures, transfers and restores it.

For DistributedDataParallel (DDP), and for any module whose parameters every rank holds whole. The script registers what
it trains with (see `docs/training-loop.md`).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ...processor import tree
from ...processor.building import check_registered
from ...processor.injection_points import fire_in_backward, fire_in_forward
from ...processor.optimizer_state import OptimizerState
from ...processor.prefault import PrefaultedMemory, aligned
from ...processor.registry import Registry, by_name
from ...processor.shard import Shard
from ...processor.values import as_value
from ...processor.whole_state import SHARD_ID, WholeState
from ...protocol.errors import RecoveryError, StateUnreadable
from ...protocol.types import InjectionPoint
from .buckets import BucketLayout

ENTRIES = 8  # tensors that optimizers keep for each parameter; with more of them the last ones are allocated late


class TrainState(WholeState):
    """Everything that training changes, so that a recovery can bring it back.

    Every argument but `values` takes one object, a list or a dict of them. Tensors may be of any shape and dtype, on
    the CPU or on the device of the job.

    Args:
        model: Modules, wrapped in DDP or not: every module whose parameters change, averaged copies too.
        optimizer: Optimizers, as in the script.
        scheduler: Learning rate schedulers, as in the script.
        scaler: Gradient scalers, as in the script.
        data: Objects with state_dict and load_state_dict that say where in the data this rank is.
        values: Anything else that changes, by name: dicts, lists, tensors, arrays, generators, objects with
            state_dict, or `Value(get, set)`. They are rank-local unless marked `replicated(...)`.

    Raises:
        ConfigurationError: An object cannot be put back in place, or parameters that were made in `midstep.building`
            are in no registered module.
        UnsupportedState: A value cannot be carried without pickle; the text names its path.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        data: Any = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        given = by_name("model", model)
        modules = {
            name: item.module if isinstance(item, DistributedDataParallel) else item for name, item in given.items()
        }
        wrapped = {name: item for name, item in given.items() if isinstance(item, DistributedDataParallel)}
        self.registry = Registry(
            modules=modules,
            optimizers=by_name("optimizer", optimizer),
            schedulers=by_name("scheduler", scheduler),
            scalers=by_name("scaler", scaler),
            data=by_name("data", data),
            values={name: as_value(name, target) for name, target in (values or {}).items()},
        )
        super().__init__(self.registry.values)
        self.registry.check()
        check_registered(parameter for module in modules.values() for parameter in module.parameters())
        self._layouts = {name: BucketLayout(name, item) for name, item in wrapped.items()}
        self._replicated = ReplicatedState(self.registry, frozenset(wrapped))

    def audit(self) -> tuple[str, ...]:
        """Return what is mutable and not registered, or changes in the wrong place.

        Runs at start and after the first steps, and warns in the rank's log.

        Returns:
            One sentence for each object that a lost rank would not get back.
        """
        return (*self.registry.audit(), *super().audit())

    @property
    def _rank(self) -> int:
        """The rank of this process."""
        return dist.get_rank()

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        for module in self.registry.modules.values():
            yield from module.parameters()
        for optimizer in self.registry.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    # --- for the recovery: the Framework protocol -----------------------------------------------------------------

    def capture_local(self) -> bytes:
        """Capture the rank-local state. Runs right before the commit barrier, on all ranks.

        In the step in which DDP's bucket rebuild is due, it is done here. That is one collective.
        """
        for layout in self._layouts.values():
            layout.settle()
        self._trailing.captured()
        return tree.pack(
            {
                "own": self.registry.capture_local(),
                "buckets": {name: layout.capture() for name, layout in self._layouts.items()},
            },
            "state",
        )

    def clean(self) -> None:
        """Make new reducers for DDP: an interrupted backward pass leaves the old ones unusable.

        Gradients stay until `rolled_back`: a rank that was ready may yet have to finish its update.
        """
        for layout in self._layouts.values():
            layout.renew()

    def rebuilt(self) -> None:
        """Do nothing: DDP keeps its group object, and nothing else follows from the communicators."""

    @property
    def moves_early(self) -> bool:
        """True: the replicated shard can be moved while the links come up, as `rebuilt` does nothing."""
        return True

    def _open(self) -> Shard:
        """Open the replicated shard."""
        return self._replicated.open()

    def _accept(self, header: bytes) -> Shard:
        """Return the tensors that receive the replicated shard."""
        return self._replicated.accept(header)

    def _adopt(self, shard: Shard) -> None:
        """Make a received replicated shard the state of this rank."""
        self._replicated.adopt(shard)

    def expect_shard(self, shard_id: str, size_bytes: int) -> None:
        """Allocate memory ahead of time for what the replicated shard adds to this rank's state."""
        self._replicated.expect(size_bytes)

    def _replicated_marks(self) -> dict[str, Any]:
        """Return the version counters of all parameters, and what else is replicated, packed."""
        registry = self.registry
        marks: dict[str, Any] = {
            f"the parameters of {name}": sum(parameter._version for parameter in module.parameters())
            for name, module in registry.modules.items()
        }
        marks |= {name: tree.pack(each.state_dict(), name) for name, each in registry.schedulers.items()}
        shared = {name: each for name, each in registry.values.items() if each.replicated}
        return marks | {f"values[{name!r}]": tree.pack(each.get(), name) for name, each in shared.items()}

    def restore_local(self, blob: bytes) -> None:
        """Restore the rank-local state that `capture_local` returned, here or in this rank's earlier process."""
        captured = tree.unpack(blob)
        if not (isinstance(captured, dict) and captured.keys() == {"own", "buckets"}):
            raise StateUnreadable("the captured state is none of a TrainState")
        if captured["buckets"].keys() != self._layouts.keys():
            raise RecoveryError(
                f"the captured state has DDP modules {sorted(captured['buckets'])}, this rank has "
                f"{sorted(self._layouts)}; do all ranks run the same script?"
            )
        for name, layout in captured["buckets"].items():
            self._layouts[name].expect(layout)
        self.registry.restore_local(captured["own"])

    def adopt_local(self, blob: bytes, *, random_numbers: bool) -> None:
        """Restore what `capture_local` returned in a world of another size."""
        random_state = self.registry.capture_local()["random"]
        self.restore_local(blob)
        if not random_numbers:
            self.registry.restore_random(random_state)

    def rolled_back(self, step: int) -> None:
        """Drop gradients and half-done scaling, and restore DDP's buckets as of step `step`."""
        for parameter in self._all_parameters():
            parameter.grad = None
        for scaler in self.registry.scalers.values():
            if isinstance(scaler, GradScaler):
                scaler._per_optimizer_states.clear()  # else the repeated unscale_ would be refused
        for layout in self._layouts.values():
            layout.refresh()

    def fire_in(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        """Call `fire` once, in the middle of the next forward or backward pass, to inject a fault there."""
        modules = list(self.registry.modules.values())
        if point is InjectionPoint.FORWARD:
            fire_in_forward(modules, fire)
        elif point is InjectionPoint.BACKWARD:
            fire_in_backward(modules, fire)


class ReplicatedState:
    """The replicated shard of a registry: parameters, optimizer state and all else that is the same on every rank.

    A source opens its live tensors, uncopied. A destination receives into its live tensors where they fit, so that
    every handle on a parameter stays valid and a survivor needs no second copy; what does not exist yet (a newcomer's
    optimizer state) is allocated and then becomes the live state without another copy. From `accept` until `adopt` the
    state of this rank is therefore neither the old one nor the new one.

    `synced_buffers` names the modules whose buffers were made equal at start (by DDP): their contents then travel
    along, as a newcomer cannot know them if they were drawn at random.
    """

    def __init__(self, registry: Registry, synced_buffers: frozenset[str]) -> None:
        self._registry = registry
        self._synced = synced_buffers
        self._optimizers = {name: OptimizerState(name, item) for name, item in registry.optimizers.items()}
        self._room: PrefaultedMemory | None = None  # from `expect` until `adopt`

    def open(self) -> Shard:
        """Open this rank's state as a source. Raises UnsupportedState for what cannot be carried."""
        content = {
            "parameters": {
                name: {path: parameter.detach() for path, parameter in module.named_parameters()}
                for name, module in self._registry.modules.items()
            },
            "baseline": self._baseline(),
            "optimizers": {name: state.collect() for name, state in self._optimizers.items()},
            "small": self._registry.small_replicated(),
        }
        skeleton, tensors = tree.flatten(content, SHARD_ID)
        return Shard(skeleton, [tensor.contiguous() for tensor in tensors])

    def expect(self, size_bytes: int) -> None:
        """Start to allocate memory for a shard of `size_bytes`, less what live tensors can receive."""
        parameters = [parameter for module in self._registry.modules.values() for parameter in module.parameters()]
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
            torch.empty(slot.shape, dtype=slot.dtype) if tensor is None else tensor
            for slot, tensor in zip(slots, tensors, strict=True)
        ]
        return Shard(header, filled)

    def adopt(self, shard: Shard) -> None:
        """Make an accepted shard, now received, the state of this rank."""
        content = tree.unflatten(shard.header, shard.tensors)
        for name, module in self._registry.modules.items():
            for path, parameter in module.named_parameters():
                arrived = content["parameters"][name][path]
                if arrived.data_ptr() != parameter.data_ptr():
                    parameter.data.copy_(arrived)
        self._registry.buffers.adopt_baseline(content["baseline"])
        self._registry.adopt_small_replicated(content["small"])
        for name, state in self._optimizers.items():
            state.adopt(content["optimizers"][name])
        self._leave_room()

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
        modules = self._registry.modules
        _require_same("modules", outline["parameters"], modules)
        _require_same("optimizers", outline["optimizers"], self._optimizers)
        for name, module in modules.items():
            live = dict(module.named_parameters())
            _require_same(f"parameters of {name}", outline["parameters"][name], live)
            for path, slot in outline["parameters"][name].items():
                yield f"{name}.{path}", slot, live[path].data, live[path].device
        for name, state in self._optimizers.items():
            yield from state.targets(outline["optimizers"][name])


def _require_same(kind: str, arrived: dict[str, Any], here: dict[str, Any]) -> None:
    if arrived.keys() != here.keys():
        only_there = sorted(arrived.keys() - here.keys())[:3]
        only_here = sorted(here.keys() - arrived.keys())[:3]
        raise RecoveryError(
            f"{kind} differ between ranks: only at the source {only_there}, only here {only_here}; do all ranks run "
            "the same script?"
        )
