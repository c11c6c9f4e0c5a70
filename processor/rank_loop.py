"""The loop of a rank from joining its world to its release: pure. It yields actions; a driver carries them out.

Train; when something breaks stop and clean, report, park; do as ordered; train again from the interrupted step.

It yields the actions of `rank_actions.py`, is sent their outcomes, and has their exceptions thrown into it. The train
thread of a process carries them out (`train_thread.py`), and so does each process of the simulation. In the middle of
its Train the end of a step (`step_order.py`) may come to a broken commit barrier: `hold` says what is done there.
"""

from ..protocol import messages as m
from ..protocol.errors import CommunicatorAborted, StateLost
from ..protocol.types import Activity, FaultKind, InjectionPoint
from . import rank_actions as act
from .rank_actions import Actions, Ended
from .session import Order, Session, SessionStage
from .step_order import Leave, StepOrder, StepState

GIVEN_UP = "the step is given up"


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
                yield act.PublishCheckpoint()
                yield act.SetActivity(Activity.FINISHED)
                yield act.Flush()
                return
            else:
                yield from self._save(order)

    def hold(self) -> Actions[bool]:
        """Report that the commit barrier broke while this rank held final gradients; return whether to apply them."""
        yield from self._stop()
        yield act.BeginPhase(InjectionPoint.CLEAN)
        self._step_state.mark_corrupted((yield act.Inspect()))  # and nothing is dropped: the update may yet be applied
        yield from self._end_phase(InjectionPoint.CLEAN)
        while True:
            order = yield act.AwaitOrder()
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
        yield act.SetActivity(Activity.RECOVERING)
        if self._early:
            self._session.reach(SessionStage.WAITING)
            yield act.AwaitOrder()  # a Quiesce: nothing else fits
        self._session.reach(SessionStage.PARKED)
        report = yield act.Survey(joining=True)
        yield act.Join(report)

    def _next_order(self) -> Actions[Order]:
        held, self._held = self._held, None
        if held is not None:
            return held
        order: Order = yield act.AwaitOrder()
        return order

    def _train(self, order: m.Resume) -> Actions[None]:
        """Have the train function called once, and follow from how it was left."""
        session = self._session
        session.reach(SessionStage.TRAINING)
        self._first_step = True
        ended = yield act.Train(order)
        way = self._steps.leave(finished=ended is Ended.RETURNED, failed=ended is Ended.FAILED)
        if way is Leave.FINISHED:
            session.reach(SessionStage.FINISHED)
            yield act.SetActivity(Activity.FINISHED)
            count = self._step_state.count
            yield act.Post(m.RankFinished(session.rank, session.generation, session.incarnation, count))
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
            failed: str | None = yield act.FindFailure()
            if failed is not None and not (reported or asked or self._session.quiescing):
                yield act.ReportFault(FaultKind.COMMUNICATION, failed)
            reason = failed or GIVEN_UP
        self._steps.at_boundary = False  # there, others may still be in the step's end, and rebuild cuts the links
        yield act.BeginPhase(InjectionPoint.STOP)
        yield act.StopInFlight(reason)
        yield from self._end_phase(InjectionPoint.STOP)
        yield act.SetActivity(Activity.RECOVERING)

    def _clean(self) -> Actions[None]:
        yield act.BeginPhase(InjectionPoint.CLEAN)
        self._step_state.mark_corrupted((yield act.Clean()))
        yield from self._end_phase(InjectionPoint.CLEAN)
        self._step_state.gradients_dropped()

    def _park(self, order: m.Quiesce) -> Actions[None]:
        """Say where this rank stands, for barrier one.

        For the generation of this order: while the next one waits, an answer for that one would come from a thread
        that does not take what follows from it.
        """
        session = self._session
        session.reach(SessionStage.PARKED)
        report = yield act.Survey()
        yield act.Post(
            m.RankQuiesced(session.rank, order.generation, session.incarnation, report, dict(self._phases_s))
        )

    def _rejoin(self, order: m.Rejoin) -> Actions[None]:
        """Do this rank's part of the plan, and report for barrier two; a failure ends the attempt."""
        session = self._session
        session.reach(SessionStage.REJOINING)
        self._phases_s = {}
        yield act.PublishCheckpoint()  # of a boundary: all ranks have parked there, and have written their parts
        yield act.ClaimCheckpoints(order.generation)
        if self._steps.held:
            yield from self._clean()  # held at the barrier until now, with the gradients
        received, failed = act.NOTHING, True
        try:
            received = yield from self._come_back(order)
            failed = False
        except CommunicatorAborted:  # for the next generation
            pass
        except Exception as error:  # torch has no limit to the kinds that it raises
            yield act.JudgeFailure(error)
        if failed:
            yield act.Halt()
            self._phases_s = {}
        elif not session.quiescing:
            session.reach(SessionStage.READY)
            count, phases_s = self._step_state.count, self._phases_s
            ready = m.RankReady(session.rank, order.generation, session.incarnation, count, phases_s, *received)
            yield act.Post(ready)

    def _come_back(self, order: m.Rejoin) -> Actions[act.ReceivedBytes]:
        """Rebuild, repair and roll back; return what was received."""
        step_state, step = self._step_state, order.part.target_step
        yield act.BeginPhase(InjectionPoint.REBUILD)
        step_state.mark_corrupted((yield act.Inspect()))  # an attempt before this one may have left the device stopped
        if step_state.corrupted_since_report:
            raise StateLost(f"rank {self._session.rank}: device memory was corrupted after the repair was planned")
        yield act.Rebuild(order)
        yield from self._end_phase(InjectionPoint.REBUILD)
        yield act.BeginPhase(InjectionPoint.REPAIR)
        step_state.repairing(order.part, self._session.rank)
        received: act.ReceivedBytes = yield act.Repair(order)
        step_state.repaired()
        yield from self._end_phase(InjectionPoint.REPAIR)
        yield act.BeginPhase(InjectionPoint.ROLLBACK)
        yield act.RecallLocalState(step)
        self._steps.rolled_back(step)
        yield act.RollBack(order)
        step_state.whole_again()
        yield from self._end_phase(InjectionPoint.ROLLBACK)
        return received

    def _save(self, order: Order) -> Actions[None]:
        """Write an emergency checkpoint while parked; nothing else can be ordered then."""
        if not isinstance(order, m.SaveCheckpoint):
            yield act.IgnoreOrder(order)
            return
        path, error = yield act.Save(order)
        if not order.answer:
            return
        yield act.Post(m.CheckpointSaved(self._session.rank, order.generation, order.step, path, error))

    def _end_phase(self, point: InjectionPoint) -> Actions[None]:
        seconds = yield act.EndPhase()
        self._phases_s[point.value] = self._phases_s.get(point.value, 0.0) + seconds
