"""The train state of a plain PyTorch script, and how a recovery captures, transfers and restores it.

For DistributedDataParallel (DDP), and for any module whose parameters every rank holds whole. The script registers what
it trains with (see `docs/training-loop.md`).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ...processor import tree
from ...processor.building import check_registered
from ...processor.framework import ModelReplica
from ...processor.injection_points import fire_in_backward, fire_in_forward
from ...processor.registry import Registry, by_name
from ...processor.shard import Shard
from ...processor.shard_layout import ShardLayout
from ...processor.values import as_value
from ...processor.whole_state import WholeState
from ...protocol.errors import ConfigurationError, RecoveryError, StateUnreadable
from ...protocol.types import InjectionPoint
from .buckets import BucketLayout
from .replicated_state import ReplicatedState

# What shards a model in a way that this train state cannot read, and the way there.
_REFUSED = {
    "FullyShardedDataParallel": "FSDP1 flattens parameters into its own buffers. Use fully_shard (FSDP2), which is "
    "called for the modules that an auto_wrap_policy would have wrapped, see docs/fsdp.md",
    "DeepSpeedEngine": "DeepSpeed's ZeRO keeps parameters and optimizer state in buffers of its own. Use fully_shard "
    "(FSDP2), which shards the same, see docs/fsdp.md",
}


class TrainState(WholeState):
    """Everything that training changes, so that a recovery can bring it back.

    Every argument but `values` takes one object, a list or a dict of them. Tensors may be of any shape and dtype, on
    the CPU or on the device of the job. Parameters may be whole on every rank (DDP, or modules that the script
    synchronises itself), or sharded by `fully_shard`, on one mesh dimension or with replicas (HSDP): that is found out.

    Args:
        model: Modules, wrapped in DDP, sharded or neither: every module whose parameters change, averaged copies too.
        optimizer: Optimizers, as in the script.
        scheduler: Learning rate schedulers, as in the script.
        scaler: Gradient scalers, as in the script.
        data: Objects with state_dict and load_state_dict that say where in the data this rank is.
        values: Anything else that changes, by name: dicts, lists, tensors, arrays, generators, objects with
            state_dict, or `Value(get, set)`. They are rank-local unless marked `replicated(...)`.

    Raises:
        ConfigurationError: An object cannot be put back in place, parameters that were made in `midstep.building` are
            in no registered module, or the model is sharded in a way that cannot be recovered; the text says which.
        UnsupportedState: A value cannot be carried without pickle; the text names its path.
    """

    def __new__(cls, model: Any, *_: Any, **__: Any) -> "TrainState":
        """Make the state for sharded parameters where there are some."""
        if cls is TrainState and _is_sharded(without_ddp(by_name("model", model)).values()):
            from ..fsdp.state import ShardedTrainState

            return super().__new__(ShardedTrainState)
        return super().__new__(cls)

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
        _refuse_other_shards([*given.items(), *by_name("optimizer", optimizer).items()])
        modules = without_ddp(given)
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
        self._check_state()
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

    def layout(self, shard_id: str) -> ShardLayout:
        """Return what the tensors of the replicated shard are called outside of midstep."""
        return self._replicated.layout()

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the buffers that a module's `state_dict` has, by module and path."""
        return {
            name: {
                f"{place}.{each}" if place else each: buffer.detach()
                for place, layer in module.named_modules()
                for each, buffer in layer._buffers.items()
                if buffer is not None and each not in layer._non_persistent_buffers_set
            }
            for name, module in self.registry.modules.items()
        }

    @property
    def changes_in_updates_alone(self) -> bool:
        """True: parameters and optimizer state are its tensors. Buffers, which a forward pass changes, are not."""
        return True

    def _replicated_marks(self) -> dict[str, Any]:
        """Return the version counters of all parameters, and what else is replicated, packed."""
        registry, marks = self.registry, self._parameter_marks()
        marks |= {name: tree.pack(each.state_dict(), name) for name, each in registry.schedulers.items()}
        shared = {name: each for name, each in registry.values.items() if each.replicated}
        return marks | {f"values[{name!r}]": tree.pack(each.get(), name) for name, each in shared.items()}

    def _parameter_marks(self) -> dict[str, Any]:
        return {
            f"the parameters of {name}": sum(parameter._version for parameter in module.parameters())
            for name, module in self.registry.modules.items()
        }

    def _check_state(self) -> None:
        """Try to encode everything once. Raises UnsupportedState with the path of what cannot be."""
        self.registry.check()

    def restore_local(self, blob: bytes) -> None:
        """Restore the rank-local state that `capture_local` returned, here or in this rank's earlier process."""
        captured = tree.unpack(blob)
        if not (isinstance(captured, dict) and captured.keys() == {"own", "buckets"}):
            raise StateUnreadable("the captured state is none of a TrainState")
        buckets = captured["buckets"]
        if not buckets or not self._layouts:  # a checkpoint that was written with other wrappers around the model
            buckets = dict.fromkeys(self._layouts, BucketLayout.AT_START)
        if buckets.keys() != self._layouts.keys():
            raise RecoveryError(
                f"the captured state has DDP modules {sorted(captured['buckets'])}, this rank has "
                f"{sorted(self._layouts)}; do all ranks run the same script?"
            )
        for name, layout in buckets.items():
            self._layouts[name].expect(layout)
        self.registry.restore_local(captured["own"])

    def model_replica(self) -> ModelReplica | None:
        """Return this rank alone: it holds all parameters, and gradients meet when they are computed."""
        return ModelReplica((dist.get_rank(),), tuple(range(dist.get_world_size())))

    def step_left(self, step: int) -> None:
        """Drop the gradients of a step that ends before its update, as a rollback does."""
        self.rolled_back(step)

    def capture_conditions(self) -> bytes:
        """Capture random numbers, buffers and this rank's values."""
        return tree.pack(self.registry.capture_conditions(), "state")

    def take_conditions(self, blob: bytes) -> None:
        """Put back what `capture_conditions` has returned on another rank."""
        self.registry.take_conditions(tree.unpack(blob))

    @property
    def has_data(self) -> bool:
        """True if positions in the data are registered: batches that are left out are left out of them."""
        return bool(self.registry.data)

    @property
    def handed_out(self) -> dict[str, int] | None:
        """How many batches each of the registered data has handed out; None: there is none, or one cannot say."""
        data = self.registry.data
        counted = {name: each.handed_out for name, each in data.items() if hasattr(each, "advanced")}
        return counted if counted.keys() == data.keys() and data else None

    def advance(self, blob: bytes, batches: Mapping[str, int]) -> bytes:
        """Return a captured state with the data's positions so many batches further on."""
        captured = tree.unpack(blob)
        positions = captured["own"]["data"]
        for name, count in batches.items():
            positions[name] = self.registry.data[name].advanced(positions[name], count)
        return tree.pack(captured, "state")

    def leave_out(self, blob: bytes, later: bytes) -> bytes:
        """Return a captured state with the data's position of a later one; without data, with its random numbers."""
        captured, part = tree.unpack(blob), "data" if self.has_data else "random"
        captured["own"][part] = tree.unpack(later)["own"][part]
        return tree.pack(captured, "state")

    def adopt_local(self, blob: bytes, *, random_numbers: bool) -> None:
        """Restore what `capture_local` returned in a world of another size."""
        random_state = self.registry.capture_local()["random"]
        self.restore_local(blob)
        if not random_numbers:
            self.registry.restore_random(random_state)

    def refuse_growth(self) -> None:
        """Refuse positions in the data that cannot be divided again while this process lives.

        Raises:
            ConfigurationError: The text names them.
        """
        fixed = sorted(name for name, each in self.registry.data.items() if not hasattr(each, "grown"))
        if fixed:
            raise ConfigurationError(
                f"scale.in_place in the policy: {', '.join(fixed)} cannot be divided among more ranks. Give "
                "ResumableBatches, or an object of your own with a method grown(world_size), or leave scale.in_place "
                "out: all processes restart to grow"
            )

    def grown(self, world_size: int) -> None:
        """Let the data know of a larger world. The positions are loaded afterwards."""
        for each in self.registry.data.values():
            each.grown(world_size)

    def rolled_back(self, step: int) -> None:
        """Drop gradients and half-done scaling, and restore DDP's buckets as of step `step`."""
        for parameter in self._all_parameters():
            parameter.grad = None
        for scaler in self.registry.scalers.values():
            if isinstance(scaler, GradScaler):
                scaler._per_optimizer_states.clear()  # else the repeated unscale_ would be refused
        for layout in self._layouts.values():
            layout.refresh()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that this rank's update will use."""
        return [parameter.grad for parameter in self._all_parameters() if parameter.grad is not None]

    def trained(self) -> list[torch.Tensor]:
        """Return the parameters that the backward pass computes gradients of."""
        parameters = (each for module in self.registry.modules.values() for each in module.parameters())
        return [each for each in parameters if each.requires_grad]

    def fire_in(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        """Call `fire` once, in the middle of the next forward or backward pass, to inject a fault there."""
        modules = list(self.registry.modules.values())
        if point is InjectionPoint.FORWARD:
            fire_in_forward(modules, fire)
        elif point is InjectionPoint.BACKWARD:
            fire_in_backward(modules, fire)


def without_ddp(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modules themselves, by name: without the wrapper of DDP."""
    return {name: item.module if isinstance(item, DistributedDataParallel) else item for name, item in given.items()}


def _is_sharded(modules: Iterable[Any]) -> bool:
    """Return whether parameters are sharded, or would be if they were not gathered just now."""
    tensors = sys.modules.get("torch.distributed.tensor")  # not loaded for this: it takes its time
    if tensors is None:
        return False
    return any(
        any("FSDPModule" in _class_names(layer) for layer in module.modules())
        or any(isinstance(parameter, tensors.DTensor) for parameter in module.parameters())
        for module in modules
    )


def _refuse_other_shards(given: Iterable[tuple[str, Any]]) -> None:
    """Refuse models and optimizers of frameworks that shard them in buffers of their own."""
    for name, item in given:
        layers = item.modules() if isinstance(item, torch.nn.Module) else (item,)
        for layer in layers:
            for kind in _class_names(layer):
                if kind in _REFUSED:
                    raise ConfigurationError(f"{name} has a {kind}, which cannot be recovered: {_REFUSED[kind]}")
        if type(item).__module__.partition(".")[0] == "deepspeed":
            raise ConfigurationError(f"{name} is DeepSpeed's, which cannot be recovered: {_REFUSED['DeepSpeedEngine']}")


def _class_names(item: object) -> list[str]:
    return [kind.__name__ for kind in type(item).__mro__]
