"""TOPIC: the boundary: all ranks stop between two steps, by themselves, so that a change begins without an abort.

The step clocks are read, a step a little ahead is chosen, and every rank gets the order to stop before it, in the
present generation. A rank that hears it too late hangs in a collective alone: after a deadline those that have not
stopped are quiesced as in any incident, and the step that they were in is repeated.
"""

import math

from ...protocol.messages import Quiesce
from ...protocol.types import Activity, FaultKind, RankProgress, rank_address
from . import topic as do
from .orders import LOOK, ask_for_clocks, faults_of, next_generation, quiesce
from .state import EXCUSED, JobState, Phase, PlannedChange, Stage
from .topic import PhaseLimit, Recs, Rule, Topic, answer_limit_s
from .world import NOT_STOPPED, RankEvent

LEAD_S = 1.0  # the boundary is at least so far ahead, for the word to reach everybody first
READ_S = 5.0  # a node that does not read its clocks in this time is asked again
UNKNOWN_STEP_S = 1.0  # a step's duration, where no rank has a history yet
LEAST_STEP_S = 0.001


def _read_clocks(state: JobState, _: do.ReadClocks) -> Recs:
    """Ask every node how far its ranks are."""
    change = state.planned.current
    assert change is not None
    change.stage = Stage.READING
    change.readings += 1
    ask_for_clocks(state)
    state.due.ahead[LOOK] = state.now + READ_S
    return None


def _clocks_are_read(state: JobState) -> Recs:
    """All step clocks are read: choose the boundary, or see why it is overdue."""
    change = state.planned.current
    if change is None or not (change.looking or change.stage is Stage.READING):
        state.clocks.forget()
        return None
    return _judge(state, change) if change.looking else _choose(state, change)


def _choose(state: JobState, change: PlannedChange) -> Recs:
    read = [clock for clock in state.clocks.take().values() if clock.generation == state.generation]
    clocks = [clock for clock in read if clock.activity is not Activity.FINISHED and not _held_up(clock)]
    if len(clocks) < state.world.size:
        return None  # somebody is not in its train function now; asked again when the time for the reading is over
    median_s = max(LEAST_STEP_S, max(clock.median_step_s for clock in clocks) or UNKNOWN_STEP_S)
    steps = [clock.step for clock in clocks]
    change.stage, change.after_step = Stage.STOPPING, max(steps) + 1 + math.ceil(LEAD_S / median_s)
    state.due.ahead.pop(LOOK, None)
    for holder in state.world.holders:
        state.world.take(holder, RankEvent.QUIESCE_ORDERED)
        state.send(rank_address(holder.rank), Quiesce(holder.rank, state.generation, change.after_step))
    training_s = (change.after_step - min(steps)) * median_s * state.policy.stall.factor
    state.enter(training_s + state.policy.stall.grace_s + state.policy.deadlines.quiesce_s)
    return None


def _held_up(clock: RankProgress) -> bool:
    """Return whether a process is stopped, and not only for a moment, as one is that has a share of its core."""
    return clock.suspended and clock.activity_age_s > max(LEAD_S, clock.median_step_s)


def _stopped(state: JobState, _: do.StoppedAtBoundary | None = None) -> Recs:
    """A rank has stopped at the boundary: from here on training waits, so the incident begins."""
    change = state.planned.current
    if change is not None and state.history.open is None:
        state.history.plan(change.report, state.world.pids(), state.now, state.progress.committed)
        state.decided(change.decision)
        state.history.entered(state.phase.value, state.generation, state.now)
        state.begin_attempt()
        state.incident = state.incident.take(change.decision.rung, change.charges)
    return None


def _over_time(state: JobState) -> Recs:
    """The boundary is overdue: look who has not reached it, and then go no further."""
    change = state.planned.current
    if change is not None and change.stage is Stage.HOLDING:
        return [do.HoldRanks()]
    if change is not None and change.stage is Stage.HANDING_OVER:
        return [do.Stay(f"the checkpoint was not written within {state.policy.deadlines.save_s:g} s")]
    if change is None or change.after_step is None:
        late = faults_of(state, state.world.ranks(*NOT_STOPPED), FaultKind.UNRESPONSIVE, "did not quiesce")
        return [*map(do.Blame, late), do.Decide()] if late else None
    if change.looking:
        return _stop_at_once(state, change)  # a node does not say
    change.looking = True
    ask_for_clocks(state)
    state.limit(READ_S)
    return None


def _judge(state: JobState, change: PlannedChange) -> Recs:
    """Wait on for who writes a checkpoint or has paused its clock; who hangs otherwise is not waited for."""
    change.looking = False
    excused = {clock.rank for clock in state.clocks.take().values() if clock.activity in EXCUSED}
    if excused.isdisjoint(state.world.ranks(*NOT_STOPPED)):
        return _stop_at_once(state, change)
    state.limit(state.policy.deadlines.quiesce_s)
    return None


def _stop_at_once(state: JobState, change: PlannedChange) -> Recs:
    """Quiesce those who have not stopped, as in any incident."""
    _stopped(state)
    change.after_step, change.looking = None, False
    next_generation(state, ())
    quiesce(state, state.world.holders)
    state.enter(state.policy.deadlines.quiesce_s)
    return None


BOUNDARY = Topic(
    name="boundary",
    answers={do.ReadClocks: _read_clocks, do.StoppedAtBoundary: _stopped},
    rules=(Rule(frozenset({Phase.RUNNING, Phase.PAUSING}), lambda state: state.clocks.complete, _clocks_are_read),),
    limits={Phase.PAUSING: PhaseLimit(_over_time, answer_limit_s)},
)
