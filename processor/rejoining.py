"""The way back: rebuild, repair, rollback, in the train thread, timed phase by phase."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..protocol.errors import CheckpointError, StateLost
from ..protocol.messages import Rejoin
from ..protocol.types import Moment, RestoreSource, ShardHold, StepReport
from . import checkpoint
from .transfer import run_transfers

if TYPE_CHECKING:
    from .ledger import Ledger
    from .lifecycle import Framework
    from .runtime import Runtime

_log = logging.getLogger("midstep")


class Phases:
    """Seconds by phase; each phase is also a moment at which a fault can be armed."""

    def __init__(self, reached: Callable[[Moment], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._reached = reached

    @contextmanager
    def phase(self, moment: Moment) -> Iterator[None]:
        """Time one phase."""
        began_s = time.monotonic()
        self._reached(moment)
        yield
        self.seconds[moment.value] = self.seconds.get(moment.value, 0.0) + time.monotonic() - began_s


class Rejoining:
    """Carries out Rejoin orders, and remembers whether what this rank holds is whole."""

    def __init__(self, runtime: "Runtime", framework: "Framework", ledger: "Ledger") -> None:
        self._runtime = runtime
        self._framework = framework
        self._ledger = ledger
        # A world that starts together holds its initial state; a single newcomer holds nothing of worth.
        self.clean = runtime.seated

    def report(self) -> StepReport:
        """Say where this rank stands, for barrier one."""
        runtime, ledger = self._runtime, self._ledger
        shards = self._framework.shards()
        held: tuple[ShardHold, ...] = shards if self.clean else ()
        return StepReport(
            committed=ledger.count,
            ready=ledger.ready,
            clean=self.clean,
            holds=held,
            needs=tuple(shard.shard_id for shard in shards),
            own_states=runtime.black_box.copies(),
            checkpoints=self._readable_checkpoints(),
        )

    def _readable_checkpoints(self) -> tuple[int, ...]:
        directory = self._runtime.settings.checkpoint_directory
        if directory is None:
            return ()
        try:
            return checkpoint.complete_steps(directory)
        except CheckpointError as error:
            _log.error("no checkpoint can be used: %s", error)
            return ()

    def rejoin(self, order: Rejoin, phases: Phases) -> int:
        """Rebuild, repair and roll back; returns the bytes received.

        Raises CommunicatorAborted when the next generation is opened meanwhile, LinkUpFailed, CommunicatorFailed,
        ChecksumMismatch, StateLost and CheckpointError.
        """
        runtime, framework, part = self._runtime, self._framework, order.part
        with phases.phase(Moment.REBUILD):
            if not order.seated:
                runtime.communicator.reseat(order.generation, order.store, runtime.settings.link_up_s)
            runtime.step_clock.generation(order.generation)
            runtime.device.rebuilt()
            framework.rebuilt()
        changes = part.restore is RestoreSource.CHECKPOINT or any(
            transfer.destination == runtime.rank for transfer in part.transfers
        )
        with phases.phase(Moment.REPAIR):
            self.clean = self.clean and not changes
            received, own = self._repair(order)
        with phases.phase(Moment.ROLLBACK):
            self._roll_back(part.target_step, own)
            self.clean = True
        return received

    def _repair(self, order: Rejoin) -> tuple[int, bytes | None]:
        runtime, framework, part = self._runtime, self._framework, order.part
        if part.restore is RestoreSource.CHECKPOINT:
            return self._load(part.target_step)
        done = run_transfers(
            part,
            rank=runtime.rank,
            framework=framework,
            links=runtime.communicator,
            read_own_state=runtime.own_states.read,
        )
        return done.bytes_received, done.own_state

    def _load(self, step: int) -> tuple[int, bytes | None]:
        runtime, framework = self._runtime, self._framework
        directory = runtime.settings.checkpoint_directory
        assert directory is not None
        for hold in framework.shards():
            checkpoint.load_shard(directory, step, hold.shard_id, framework)
        return 0, checkpoint.load_own(directory, step, runtime.rank)

    def _roll_back(self, step: int, own: bytes | None) -> None:
        runtime = self._runtime
        blob = own if own is not None else runtime.own_states.read(runtime.rank, step)
        if blob is None:
            raise StateLost(f"rank {runtime.rank} has no copy of its own state as of step {step}")
        self._ledger.reset(step)
        self._framework.restore_own(blob)
        self._framework.rolled_back(step)
        runtime.own_states.keep(step, blob)
        runtime.own_states.swap(step, blob)
