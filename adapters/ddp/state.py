"""The train state of a plain PyTorch script, and how a recovery captures, transfers and restores it.

For DistributedDataParallel (DDP), and for any module whose parameters every rank holds whole. The script registers what
it trains with (see `docs/training-loop.md`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ...processor import tree
from ...processor.autograd_hooks import fire_in_backward, fire_in_forward
from ...processor.building import check_registered
from ...processor.framework import OpenShard
from ...processor.registry import Registry, by_name
from ...processor.shard import Shard
from ...processor.values import as_value
from ...protocol.errors import NotUnderMidstep, RecoveryError
from ...protocol.types import InjectionPoint, ShardHold
from .buckets import BucketLayout
from .replicated_state import SHARD_ID, ReplicatedState

if TYPE_CHECKING:
    from ...processor.ledger import Ledger, Step


class TrainState:
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
        self.registry.check()
        check_registered(parameter for module in modules.values() for parameter in module.parameters())
        self._layouts = {name: BucketLayout(name, item) for name, item in wrapped.items()}
        self._replicated = ReplicatedState(self.registry, frozenset(wrapped))
        self._ledger: Ledger | None = None

    # --- for the script -------------------------------------------------------------------------------------------

    def bind(self, ledger: "Ledger") -> None:
        """Set the step ledger of the train function that is about to run."""
        self._ledger = ledger

    def steps(self, total: int) -> Iterator["Step"]:
        """Go through the steps that are left of `total`.

        Args:
            total: The number of steps of the whole training, those before a recovery or restart included.

        Returns:
            An iterator of `midstep.processor.ledger.Step`.

        Raises:
            NotUnderMidstep: The call was made outside of a resilient train function.
        """
        return self._bound("steps").steps(total)

    def paused(self) -> AbstractContextManager[None]:
        """Stop the step clock in a `with` block: for an evaluation and other things that rightly take long.

        A hang of this rank inside the block is not noticed.

        Raises:
            NotUnderMidstep: The call was made outside of a resilient train function.
        """
        paused: AbstractContextManager[None] = self._bound("paused").paused()
        return paused

    @property
    def step(self) -> int:
        """The index of the current step, 0-based: how many updates have been committed."""
        return self._bound("step").count

    def audit(self) -> tuple[str, ...]:
        """Return what is mutable and not registered. Runs at start, and warns in the rank's log.

        Returns:
            One sentence for each object that a lost rank would not get back.
        """
        return self.registry.audit()

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        for module in self.registry.modules.values():
            yield from module.parameters()
        for optimizer in self.registry.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _bound(self, name: str) -> "Ledger":
        if self._ledger is None:
            raise NotUnderMidstep(
                f"TrainState.{name} is only available inside a train function that midstep runs: decorate the function "
                "with @midstep.resilient, or call midstep.resilient(state) around it, and use the state that it passes"
            )
        return self._ledger

    # --- for the recovery: the Framework protocol -----------------------------------------------------------------

    def shards(self) -> tuple[ShardHold, ...]:
        """Return the only shard, the replicated one, with its size now."""
        return (ShardHold(SHARD_ID, self._replicated.open().size_bytes),)

    def writes(self) -> tuple[str, ...]:
        """Return the shards that this rank writes into checkpoints: on rank 0 the replicated one."""
        return (SHARD_ID,) if dist.get_rank() == 0 else ()

    def capture_local(self) -> bytes:
        """Capture the rank-local state. Runs right before the commit barrier, on all ranks.

        In the step in which DDP's bucket rebuild is due, it is done here. That is one collective.
        """
        for layout in self._layouts.values():
            layout.settle()
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
        """Whether the replicated shard can be moved while the links come up: always. `rebuilt` does nothing."""
        return True

    def open_shard(self, shard_id: str) -> OpenShard:
        """Open the replicated shard to send from it."""
        _known(shard_id)
        return self._replicated.open()

    def expect_shard(self, shard_id: str, size_bytes: int) -> None:
        """Allocate memory ahead of time for what the replicated shard adds to this rank's state."""
        _known(shard_id)
        self._replicated.expect(size_bytes)

    def accept_shard(self, shard_id: str, header: bytes) -> OpenShard:
        """Provide the tensors that receive the replicated shard. Until `adopt_shard` this rank's state is not whole."""
        _known(shard_id)
        return self._replicated.accept(header)

    def adopt_shard(self, shard_id: str, shard: OpenShard) -> None:
        """Make the received replicated shard the state of this rank."""
        _known(shard_id)
        if not isinstance(shard, Shard):
            raise RecoveryError(f"shard {shard_id!r} was not accepted by this state, it is a {type(shard).__name__}")
        self._replicated.adopt(shard)

    def restore_local(self, blob: bytes) -> None:
        """Restore the rank-local state that `capture_local` returned, here or in this rank's earlier process."""
        captured = tree.unpack(blob)
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


def _known(shard_id: str) -> None:
    if shard_id != SHARD_ID:
        raise RecoveryError(f"there is no shard {shard_id!r} in plain data parallel training, only {SHARD_ID!r}")
