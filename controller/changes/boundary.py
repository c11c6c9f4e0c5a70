"""All ranks stop between two steps, by themselves: how a planned change begins without an aborted collective.

The step clocks are read, a step a little ahead is chosen, and every rank gets the order to stop before it, in the
present generation. A rank that hears it too late hangs in a collective alone: after a deadline those that have not
stopped are quiesced as in any incident, and the step that they were in is repeated.
"""

import math

from ...protocol.messages import Quiesce, StopProcess
from ...protocol.types import Activity, RankProgress, node_address, rank_address
from ..faults import excused_ranks
from ..recovery.state import JobState, Phase, Plan, Stage
from ..recovery.world import NodeState, RankEvent, RankState
from . import step_clocks
from .generation import next_generation, quiesce

LEAD_S = 1.0  # the boundary is at least so far ahead, for the word to reach everybody first
READ_S = 5.0  # a node that does not read its clocks in this time is asked again
READINGS = 6  # then the plan is given up
UNKNOWN_STEP_S = 1.0  # a step's duration, where no rank has a history yet
LEAST_STEP_S = 0.001
AGAIN_S = 30.0  # after a plan was given up


def read_clocks(state: JobState, plan: Plan, now: float) -> None:
    """Ask every node how far its ranks are."""
    plan.stage = Stage.READING
    plan.readings += 1
    step_clocks.ask(state)
    state.plans.due_s = now + READ_S


def consider(state: JobState, now: float) -> None:
    """All step clocks are read: choose the boundary, or see why it is overdue."""
    plan = state.plans.current
    if plan is None or not (plan.looking or plan.stage is Stage.READING):
        step_clocks.forget(state)
    elif plan.looking:
        _judge(state, plan, now)
    else:
        _choose(state, plan, now)


def _choose(state: JobState, plan: Plan, now: float) -> None:
    clocks = [clock for clock in step_clocks.take(state).values() if _trains(state, clock)]
    if len(clocks) < state.world.size:
        return  # somebody is not in its train function now; asked again when the time for the reading is over
    median_s = max(LEAST_STEP_S, max(clock.median_step_s for clock in clocks) or UNKNOWN_STEP_S)
    steps = [clock.step for clock in clocks]
    plan.stage, plan.after_step = Stage.STOPPING, max(steps) + 1 + math.ceil(LEAD_S / median_s)
    state.plans.due_s = None
    for holder in state.world.holders:
        state.world.take(holder, RankEvent.QUIESCE_ORDERED)
        state.send(rank_address(holder.rank), Quiesce(holder.rank, state.generation, plan.after_step))
    training_s = (plan.after_step - min(steps)) * median_s * state.policy.stall.factor
    state.enter(now, training_s + state.policy.stall.grace_s + state.policy.deadlines.quiesce_s)


def _trains(state: JobState, clock: RankProgress) -> bool:
    return clock.generation == state.generation and clock.activity is not Activity.FINISHED and not clock.suspended


def stopped(state: JobState, now: float) -> None:
    """A rank has stopped at the boundary: from here on training waits, so the incident begins."""
    plan = state.plans.current
    if plan is None or state.history.open is not None:
        return
    state.history.plan(plan.report, state.world.pids(), now, state.progress.committed)
    state.decided(plan.decision)
    state.history.entered(state.phase.value, state.generation, now)
    state.begin_attempt()
    state.incident = state.incident.take(plan.decision.rung, plan.charges)


def not_stopped(state: JobState) -> set[int]:
    """Return the ranks that have not stopped at the boundary; one that has finished before it never will."""
    return state.world.ranks(RankState.QUIESCING, RankState.FINISHED)


def before_boundary(state: JobState, committed: int) -> bool:
    """Whether a rank that has committed so many steps has yet to reach the boundary.

    Only there does it stop in this generation: what it says of an earlier stop is an old word, of how it came into it.
    """
    plan = state.plans.current
    return plan is not None and plan.after_step is not None and committed < plan.after_step


def late(state: JobState, now: float) -> bool:
    """The boundary is overdue: look who has not reached it, and then go no further. False if that was done before."""
    plan = state.plans.current
    if plan is None or plan.after_step is None:
        return False
    if plan.looking:
        _stop_now(state, plan, now)  # a node does not say
    else:
        plan.looking = True
        step_clocks.ask(state)
        state.due.phase_s = now + READ_S
    return True


def _judge(state: JobState, plan: Plan, now: float) -> None:
    """Wait on for who writes a checkpoint or has paused its clock; who hangs otherwise is not waited for."""
    plan.looking = False
    on_their_way = not_stopped(state)
    clocks = [clock for clock in step_clocks.take(state).values() if clock.rank in on_their_way]
    if excused_ranks(clocks):
        state.due.phase_s = now + state.policy.deadlines.quiesce_s
    else:
        _stop_now(state, plan, now)


def _stop_now(state: JobState, plan: Plan, now: float) -> None:
    """Quiesce those who have not stopped, as in any incident."""
    stopped(state, now)
    plan.after_step, plan.looking = None, False
    next_generation(state, ())
    quiesce(state, state.world.holders)
    state.enter(now, state.policy.deadlines.quiesce_s)


def give_up(state: JobState, why: str, now: float, *, failed: bool = False) -> None:
    """Drop what is planned, if anything is; it is looked at again later. `failed`: by its own fault."""
    plan, state.plans.current = state.plans.current, None
    if plan is None:
        return
    end_newcomers(state, plan)
    state.saving.outstanding.clear()
    if state.phase is not Phase.SUSPECTING:  # there the clocks are read to find who is at fault
        step_clocks.forget(state)
    state.plans.due_s = now + AGAIN_S
    unwell = state.plans.unwell.get(plan.node)
    if unwell is not None:
        unwell.note = why
        unwell.failures += failed


def end_newcomers(state: JobState, plan: Plan) -> None:
    """End the processes that were to take ranks over."""
    node = state.world.nodes.get(plan.spare)
    if node is not None and node.state is not NodeState.LOST:
        for newcomer in plan.newcomers.values():
            state.send(node_address(plan.spare), StopProcess(newcomer.rank, newcomer.incarnation, grace_s=0.0))
    plan.newcomers.clear()
