"""The order of a step, where it may be left, and what a rank holds meanwhile: pure.

It yields acts; a driver carries them out. A step ends in this order: all its collectives, then `ready`, then the commit
barrier, then the purely local update, then it is committed. So at any fault all survivors have committed step s, or
hold its final gradients, or are still computing it; there is never more than one step of skew, and never half an
update.

With the commit barrier each rank's local state (random numbers, data position) goes to a buddy on another node. No rank
commits before all have entered the barrier, and none enters before its peer copy is here; so if a rank is lost, the
state that was its alone is at hand for the step that will be repeated.

`StepState` counts updates and says which shards are whole; the step report of barrier one is made of it. The ledger of
a training process goes by both (`ledger.py`), and so does each process of the simulation.
"""

import enum
from collections.abc import Generator, Iterable, Sequence
from typing import Protocol

from ..protocol.errors import Interrupted, ProtocolViolation
from ..protocol.types import CheckpointTrace, LocalStateCopy, RepairPart, RestoreSource, ShardHold, StepReport

STORED = frozenset({RestoreSource.HOST_COPY, RestoreSource.CHECKPOINT})  # each rank loads all of its state


class Orders(Protocol):
    """The controller's orders as far as they are known, without waiting."""

    def interrupted(self) -> bool:
        """Return whether the controller wants the train thread to stop."""

    def begins(self, step: int) -> bool:
        """Return whether the step may be begun; False where all ranks are to stop between two steps."""


class Act(enum.Enum):
    """An act of the end of a step. Each may take its time; its answer is whether it went well."""

    FINISH = "finish"  # the device does all that was queued: until then a collective may still fail
    CAPTURE = "capture"  # the rank-local state is taken down, and kept where it outlives the process
    SWAP = "swap"  # the rank-local state is handed to the buddy; the peer copy is here
    MEET = "meet"  # all ranks have come so far
    HOLD = "hold"  # swap or meeting broke: report, wait for orders; the answer is whether to apply the update
    PUBLISH = "publish"  # every rank has everything of the step before: its checkpoint can be made complete


class Leave(enum.Enum):
    """How a train function is left."""

    FINISHED = "finished"
    HELD = "held"  # an order that was taken at the broken barrier comes next
    STOP = "stop"  # stop, clean, and wait for orders


class StepState:
    """Updates applied and shards held by one rank. Call a method here before the shards themselves are changed."""

    def __init__(self, *, clean: bool) -> None:
        """`clean`: True in a world that starts together, which holds its initial state; False in a single newcomer."""
        self.count = 0  # updates applied, so also the index of the next step
        self.ready = False  # the gradients of step `count` are final
        self.updating = False  # the update of step `count` has begun
        self.clean = clean  # what is held is of one step
        self.corrupted: frozenset[str] = frozenset()  # shards that are lost, while the rest is clean
        self._reported = self.corrupted

    def report(
        self,
        shards: Sequence[ShardHold],
        local_states: tuple[LocalStateCopy, ...],
        checkpoints: tuple[int, ...],
        trace: CheckpointTrace,
    ) -> StepReport:
        """Return the report of this rank for barrier one, from which the repair is planned."""
        self._reported = self.corrupted
        return StepReport(
            committed=self.count,
            ready=self.ready and self.clean and not self.corrupted,  # gradients are memory, too
            clean=self.clean,
            holds=tuple(hold for hold in shards if hold.held and self.clean and hold.shard_id not in self.corrupted),
            needs=tuple(hold.shard_id for hold in shards),
            local_states=local_states,
            checkpoints=checkpoints,
            trace=trace,
        )

    @property
    def corrupted_since_report(self) -> bool:
        """Return whether a shard was corrupted after the last report, so that no plan can take it into account."""
        return not self.corrupted <= self._reported

    def mark_corrupted(self, shards: Iterable[str]) -> None:
        """Count these shards as lost: their memory has an uncorrectable error."""
        self.corrupted |= frozenset(shards)

    def gradients_dropped(self) -> None:
        """Note that the gradients are gone: the interrupted step has to be repeated. In clean."""
        self.ready = False

    def update_torn(self) -> None:
        """Note that an update has ended halfway: the shards belong to no one step."""
        self.updating = self.ready = self.clean = False

    def repairing(self, part: RepairPart, rank: int) -> None:
        """Note that a repair begins: what it overwrites is not whole until all of it has arrived."""
        arriving = {transfer.shard_id for transfer in part.transfers if transfer.destination == rank}
        if arriving and part.target_step == self.count and self.clean:
            self.corrupted |= arriving  # the rest is of the same step, and stays
        elif arriving or part.restore in STORED:
            self.clean = False

    def repaired(self) -> None:
        """Note that all has arrived. A rank that lacked nothing else is whole again, even if the rollback fails."""
        if self.clean:
            self.corrupted = frozenset()

    def rolled_back(self, step: int) -> None:
        """Note that all state is as of `step` updates."""
        self.count, self.ready, self.updating = step, False, False

    def whole_again(self) -> None:
        """Note that repair and rollback have succeeded."""
        self.clean, self.corrupted = True, frozenset()


class StepOrder:
    """The order of one rank's steps.

    `held`: the commit barrier broke, and orders were taken there. `at_boundary`: left between two steps, where all
    ranks stop, so that nothing is in flight.
    """

    def __init__(self, step_state: StepState, orders: Orders) -> None:
        self._step_state = step_state
        self._orders = orders
        self.held = self.at_boundary = False

    def begin(self) -> int:
        """Begin the next step and return its index. Raises Interrupted where orders come first."""
        index = self._step_state.count
        if self.held or self._orders.interrupted():
            raise Interrupted
        self.at_boundary = not self._orders.begins(index)
        if self.at_boundary:
            raise Interrupted
        return index

    def end(self, index: int) -> Generator[Act, bool, None]:
        """Yield the acts that end a step, up to its update, which may begin when there are no more.

        Is sent how each went. Raises Interrupted when the step has to be repeated, ProtocolViolation out of turn.
        """
        step_state = self._step_state
        if index != step_state.count:
            raise ProtocolViolation(f"step {index} is updated a second time, or out of turn (at {step_state.count}).")
        if self._orders.interrupted():
            raise Interrupted
        yield Act.FINISH
        yield Act.CAPTURE
        step_state.ready = True
        if (yield Act.SWAP) and (yield Act.MEET):
            yield Act.PUBLISH
        else:
            finish = yield Act.HOLD
            self.held = True
            if not finish:
                raise Interrupted
        step_state.updating = True

    def commit(self) -> bool:
        """Commit the step: its update is whole. Return whether the loop continues as in an undisturbed run.

        Otherwise orders are waiting, and the update was applied for them: nothing is reported, and nothing is saved.
        """
        step_state = self._step_state
        step_state.count, step_state.ready, step_state.updating = step_state.count + 1, False, False
        return not self.held

    def void(self) -> None:
        """Note that what was bracketed as an update has not changed the step: it is computed on."""
        self._step_state.ready = self._step_state.updating = False

    def leave(self, *, finished: bool, failed: bool = False) -> Leave:
        """Say how the train function is left: `finished` when it has returned, `failed` when this process reports why.

        An update that has begun by then is torn. What was ordered at the barrier was ordered for a rank that would
        finish it, and for the state of then: a rank with a failure of its own has to report again.
        """
        if self._step_state.updating:
            self._step_state.update_torn()
            failed = True
        if self.held and not failed:
            return Leave.HELD
        self.held = False
        return Leave.FINISHED if finished and not failed and not self._orders.interrupted() else Leave.STOP

    def rolled_back(self, step: int) -> None:
        """Note that all state is as of `step` updates, and leave the broken barrier."""
        self._step_state.rolled_back(step)
        self.held = False
