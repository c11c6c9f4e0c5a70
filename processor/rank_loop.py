"""The loop of a rank from joining its world to its release, and the actions that it asks for: pure.

Train; when something breaks stop and clean, report, park; do as ordered; train again from the interrupted step.

The loop yields actions, is sent their outcomes, and has their exceptions thrown into it: it knows what each means at
that place. The train thread of a process carries them out (`train_thread.py`), and so does each process of the
simulation. In the middle of its Train the end of a step (`step_order.py`) may come to a broken commit barrier: `hold`
says what is done there.
"""

import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..protocol import messages as m
from ..protocol.errors import CommunicatorAborted, StateLost
from ..protocol.types import Activity, FaultKind, InjectionPoint, StepReport
from .session import Order, Session, SessionStage
from .step_order import Leave, StepOrder, StepState

GIVEN_UP = "the step is given up"
Returned = TypeVar("Returned")


# --- what the loop asks for -------------------------------------------------------------------------------------------


class Ended(enum.Enum):
    """How the train function was left."""

    RETURNED = "returned"
    INTERRUPTED = "interrupted"  # for orders, or by what a fault elsewhere has led to
    FAILED = "failed"  # by a fault of this process, which has been reported


@dataclass(frozen=True)
class Action:
    """Something to be done in the train thread. Where nothing is said of an outcome it is None."""


@dataclass(frozen=True)
class AwaitOrder(Action):
    """Wait for the controller's next order, which is the outcome. Raises OrdersOverdue."""


@dataclass(frozen=True)
class IgnoreOrder(Action):
    """Say that an order has no meaning here."""

    order: Order


@dataclass(frozen=True)
class Train(Action):
    """Call the train function. Outcome: how it was left. Raises what the process is to end with."""

    order: m.Resume


@dataclass(frozen=True)
class FindFailure(Action):
    """Ask why the communicators have failed. Outcome: the reason; None where they have not."""


@dataclass(frozen=True)
class StopInFlight(Action):
    """End what is in flight. `reason` None: at a step boundary, where peers may yet wait for this rank's last traffic.

    Otherwise a checkpoint that is not complete is given up: whether all ranks have written it is not known any more.
    Raises where the process has to end, after that has been reported.
    """

    reason: str | None


@dataclass(frozen=True)
class Inspect(Action):
    """Ask the device about its memory, and restart it. Outcome: the ids of the corrupted shards."""


@dataclass(frozen=True)
class Clean(Action):
    """Inspect, and drop what the interrupted step has left. Outcome as that of Inspect. Raises as StopInFlight does."""


@dataclass(frozen=True)
class Survey(Action):
    """Make the StepReport of this rank. Outcome: it. `joining`: wait longer for checkpoints, as a newcomer."""

    joining: bool = False


@dataclass(frozen=True)
class Join(Action):
    """Report RankJoined, with how long it took to get here."""

    report: StepReport


@dataclass(frozen=True)
class Post(Action):
    """Report to the controller."""

    body: m.Message


@dataclass(frozen=True)
class ReportFault(Action):
    """Report a fault of this rank."""

    kind: FaultKind
    detail: str


@dataclass(frozen=True)
class JudgeFailure(Action):
    """Report why rebuild, repair or rollback has failed. Raises it again where the process has to end."""

    error: Exception


@dataclass(frozen=True)
class SetActivity(Action):
    """Show in the step clock what the train thread is doing."""

    activity: Activity


@dataclass(frozen=True)
class BeginPhase(Action):
    """Begin a phase of the recovery: take its time, and fire a fault that is armed for it."""

    point: InjectionPoint


@dataclass(frozen=True)
class EndPhase(Action):
    """End the phase that began last. Outcome: its seconds."""


@dataclass(frozen=True)
class Rebuild(Action):
    """Connect to the world of the order's generation. Raises CommunicatorAborted, LinkUpFailed, CallbackFailed."""

    order: m.Rejoin


class ReceivedBytes(NamedTuple):
    """Bytes that a repair has brought, and how many of these came over the devices' own links."""

    size_bytes: int = 0
    over_devices_bytes: int = 0


NOTHING = ReceivedBytes()


@dataclass(frozen=True)
class Repair(Action):
    """Bring lost state back, from other ranks or a checkpoint. Outcome: what was received.

    Raises CommunicatorError, ChecksumMismatch, StateLost, CheckpointError, CallbackFailed.
    """

    order: m.Rejoin


@dataclass(frozen=True)
class RecallLocalState(Action):
    """Find this rank's local state as of `step` updates, for the rollback. Raises StateLost."""

    step: int


@dataclass(frozen=True)
class RollBack(Action):
    """Put everything back to the order's step, and hand the rank-local state to the buddy. Raises as Repair does."""

    order: m.Rejoin


@dataclass(frozen=True)
class Halt(Action):
    """Stop the device: nothing of a failed attempt may still run during the next one."""


@dataclass(frozen=True)
class PublishCheckpoint(Action):
    """Make the checkpoint that waits for it complete: all ranks have written their parts."""


@dataclass(frozen=True)
class ClaimCheckpoints(Action):
    """Mark the checkpoint directory: checkpoints of this generation count, and no others."""

    generation: int


@dataclass(frozen=True)
class Save(Action):
    """Write an emergency checkpoint. Outcome: (path, error); error empty where it is written."""

    order: m.SaveCheckpoint


@dataclass(frozen=True)
class Flush(Action):
    """Give what was posted a few seconds to arrive, before the process ends."""


Actions = Generator[Action, Any, Returned]  # is sent the outcome of each action, and returns `Returned` at its end


# --- the loop ---------------------------------------------------------------------------------------------------------


class RankLoop:
    """The loop of one process. `early`: another process holds the rank, and reports for it, up to the first Quiesce."""

    def __init__(self, session: Session, step_state: StepState, steps: StepOrder, *, early: bool = False) -> None:
        self._session = session
        self._step_state = step_state
        self._steps = steps
        self._early = early
        self._held: m.Rejoin | None = None  # an order that was taken inside the commit barrier
        self._first_step = False
        self._phases_s: dict[str, float] = {}

    def run(self) -> Actions[None]:
        """Join the world, train, and recover as often as ordered, up to the release."""
        session = self._session
        yield from self._join()
        while True:
            order = yield from self._next_order()
            if isinstance(order, m.Rejoin):
                yield from self._rejoin(order)
            elif isinstance(order, m.Resume):
                yield from self._train(order)
            elif isinstance(order, m.Quiesce):
                if session.stage is SessionStage.FINISHED:
                    yield from self._stop(asked=True)
                    yield from self._clean()
                yield from self._park(order)
            elif isinstance(order, m.Release):
                session.reach(SessionStage.RELEASED)
                yield PublishCheckpoint()
                yield SetActivity(Activity.FINISHED)
                yield Flush()
                return
            else:
                yield from self._save(order)

    def hold(self) -> Actions[bool]:
        """Report that the commit barrier broke while this rank held final gradients; return whether to apply them."""
        yield from self._stop()
        yield BeginPhase(InjectionPoint.CLEAN)
        self._step_state.mark_corrupted((yield Inspect()))  # and nothing is dropped: the update may yet be applied
        yield from self._end_phase(InjectionPoint.CLEAN)
        while True:
            order = yield AwaitOrder()
            if isinstance(order, m.Quiesce):
                yield from self._park(order)
            elif isinstance(order, m.Rejoin):
                self._held = order
                return order.part.finish_update
            else:
                yield from self._save(order)

    def commits_first_step(self) -> bool:
        """Return whether the step that was just committed is the first since the last Resume. True once for each."""
        first, self._first_step = self._first_step, False
        return first

    # --- inside -------------------------------------------------------------------------------------------------

    def _join(self) -> Actions[None]:
        yield SetActivity(Activity.RECOVERING)
        if self._early:
            self._session.reach(SessionStage.WAITING)
            yield AwaitOrder()  # a Quiesce: nothing else fits
        self._session.reach(SessionStage.PARKED)
        report = yield Survey(joining=True)
        yield Join(report)

    def _next_order(self) -> Actions[Order]:
        held, self._held = self._held, None
        if held is not None:
            return held
        order: Order = yield AwaitOrder()
        return order

    def _train(self, order: m.Resume) -> Actions[None]:
        """Have the train function called once, and follow from how it was left."""
        session = self._session
        session.reach(SessionStage.TRAINING)
        self._first_step = True
        ended = yield Train(order)
        way = self._steps.leave(finished=ended is Ended.RETURNED, failed=ended is Ended.FAILED)
        if way is Leave.FINISHED:
            session.reach(SessionStage.FINISHED)
            yield SetActivity(Activity.FINISHED)
            count = self._step_state.count
            yield Post(m.RankFinished(session.rank, session.generation, session.incarnation, count))
        elif way is Leave.STOP:
            self._held = None
            yield from self._stop(reported=ended is Ended.FAILED)
            yield from self._clean()

    def _stop(self, *, reported: bool = False, asked: bool = False) -> Actions[None]:
        """Drop everything in flight. Say why the communicators have failed, unless that is known already.

        `reported`: this process has reported a fault. `asked`: the controller has ordered the stop.
        """
        self._phases_s = {}
        reason = None
        if not self._steps.at_boundary:
            failed: str | None = yield FindFailure()
            if failed is not None and not (reported or asked or self._session.quiescing):
                yield ReportFault(FaultKind.COMMUNICATION, failed)
            reason = failed or GIVEN_UP
        self._steps.at_boundary = False  # there, others may still be in the step's end, and rebuild cuts the links
        yield BeginPhase(InjectionPoint.STOP)
        yield StopInFlight(reason)
        yield from self._end_phase(InjectionPoint.STOP)
        yield SetActivity(Activity.RECOVERING)

    def _clean(self) -> Actions[None]:
        yield BeginPhase(InjectionPoint.CLEAN)
        self._step_state.mark_corrupted((yield Clean()))
        yield from self._end_phase(InjectionPoint.CLEAN)
        self._step_state.gradients_dropped()

    def _park(self, order: m.Quiesce) -> Actions[None]:
        """Say where this rank stands, for barrier one.

        For the generation of this order: while the next one waits, an answer for that one would come from a thread
        that does not take what follows from it.
        """
        session = self._session
        session.reach(SessionStage.PARKED)
        report = yield Survey()
        yield Post(m.RankQuiesced(session.rank, order.generation, session.incarnation, report, dict(self._phases_s)))

    def _rejoin(self, order: m.Rejoin) -> Actions[None]:
        """Do this rank's part of the plan, and report for barrier two; a failure ends the attempt."""
        session = self._session
        session.reach(SessionStage.REJOINING)
        self._phases_s = {}
        yield PublishCheckpoint()  # of a boundary: all ranks have parked there, and have written their parts
        yield ClaimCheckpoints(order.generation)
        if self._steps.held:
            yield from self._clean()  # held at the barrier until now, with the gradients
        received, failed = NOTHING, True
        try:
            received = yield from self._come_back(order)
            failed = False
        except CommunicatorAborted:  # for the next generation
            pass
        except Exception as error:  # torch has no limit to the kinds that it raises
            yield JudgeFailure(error)
        if failed:
            yield Halt()
            self._phases_s = {}
        elif not session.quiescing:
            session.reach(SessionStage.READY)
            count, phases_s = self._step_state.count, self._phases_s
            ready = m.RankReady(session.rank, order.generation, session.incarnation, count, phases_s, *received)
            yield Post(ready)

    def _come_back(self, order: m.Rejoin) -> Actions[ReceivedBytes]:
        """Rebuild, repair and roll back; return what was received."""
        step_state, step = self._step_state, order.part.target_step
        yield BeginPhase(InjectionPoint.REBUILD)
        step_state.mark_corrupted((yield Inspect()))  # an attempt before this one may have left the device stopped
        if step_state.corrupted_since_report:
            raise StateLost(f"rank {self._session.rank}: device memory was corrupted after the repair was planned")
        yield Rebuild(order)
        yield from self._end_phase(InjectionPoint.REBUILD)
        yield BeginPhase(InjectionPoint.REPAIR)
        step_state.repairing(order.part, self._session.rank)
        received: ReceivedBytes = yield Repair(order)
        step_state.repaired()
        yield from self._end_phase(InjectionPoint.REPAIR)
        yield BeginPhase(InjectionPoint.ROLLBACK)
        yield RecallLocalState(step)
        self._steps.rolled_back(step)
        yield RollBack(order)
        step_state.whole_again()
        yield from self._end_phase(InjectionPoint.ROLLBACK)
        return received

    def _save(self, order: Order) -> Actions[None]:
        """Write an emergency checkpoint while parked; nothing else can be ordered then."""
        if not isinstance(order, m.SaveCheckpoint):
            yield IgnoreOrder(order)
            return
        path, error = yield Save(order)
        if not order.answer:
            return
        yield Post(m.CheckpointSaved(self._session.rank, order.generation, order.step, path, error))

    def _end_phase(self, point: InjectionPoint) -> Actions[None]:
        seconds = yield EndPhase()
        self._phases_s[point.value] = self._phases_s.get(point.value, 0.0) + seconds
