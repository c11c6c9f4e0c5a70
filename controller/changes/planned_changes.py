"""Follows what is planned: begins a change when the job can bear one, and gives it up when something comes between."""

from ...protocol.incidents import NodeStatus
from ...protocol.wording import ranks_text
from ..recovery.state import AT_THE_BOUNDARY, JobState, Phase, Resize, Stage
from ..recovery.world import DONE, Node, NodeState
from .boundary import READINGS, give_up, not_stopped, read_clocks
from .drain import begin, leave_or_stay
from .scaling import consider_growth
from .shutdown import save_first
from .spares import refill

# A planned change goes on in these; everything else is an incident, and comes first.
_QUIET = frozenset({Phase.RUNNING, Phase.PAUSING, Phase.SUSPECTING})


def follow(state: JobState, now: float) -> None:
    """Runs after every event. Costs nothing while nothing is planned and every node is well."""
    plans = state.plans
    if state.phase is Phase.RUNNING and state.turn.came_in is not Phase.RUNNING:
        refill(state, now)
    if plans.current is not None:
        _watch(state, now)
    elif state.phase is Phase.RUNNING and (plans.unwell or state.is_too_small):
        _look(state, now)
    elif state.can_restart_larger and plans.grow_due_s is None:
        consider_growth(state, now)


def _look(state: JobState, now: float) -> None:
    plans = state.plans
    if plans.due_s is None and plans.unwell and _all_train(state):
        begin(state, now)
    if (
        state.is_too_small
        and plans.current is None
        and plans.due_s is None
        and plans.grow_due_s is None
        and _all_train(state)
    ):
        consider_growth(state, now)


def _watch(state: JobState, now: float) -> None:
    plan = state.plans.current
    assert plan is not None
    if state.phase not in _QUIET:
        give_up(state, f"the job is {state.phase}", now)
    elif plan.stage in AT_THE_BOUNDARY:
        return
    elif not _all_train(state):
        give_up(state, "training is about to finish", now)
    elif plan.spare and state.world.nodes[plan.spare].state is not NodeState.SPARE:
        give_up(state, f"{plan.spare} is not spare any more", now)
    elif state.phase is Phase.RUNNING and plan.stage is Stage.PREPARING and not plan.awaiting:
        read_clocks(state, plan, now)  # put off by a suspicion that turned out to be none


def _all_train(state: JobState) -> bool:
    return not state.world.count(*DONE)


def overdue(state: JobState, now: float) -> None:
    """The time that `plans.due_s` named has come: the plan is too slow, or it is time to look again."""
    plan, state.plans.due_s = state.plans.current, None
    if plan is None:
        return
    if plan.stage is Stage.PREPARING:
        late = ranks_text(plan.awaiting)
        give_up(state, f"{late} did not reach its train function on {plan.spare} in time", now, failed=True)
    elif plan.readings < READINGS:
        read_clocks(state, plan, now)
    else:
        give_up(state, "the step clocks could not be read", now, failed=True)


def all_stopped(state: JobState) -> bool:
    """Whether every rank stands at the boundary, and the change is still to be made."""
    plan = state.plans.current
    return plan is not None and plan.stage is Stage.STOPPING and not not_stopped(state)


def make_change(state: JobState, now: float) -> None:
    """All ranks stand at the boundary: make the planned change."""
    plan = state.plans.current
    assert plan is not None
    if plan.nodes:
        state.plans.current, state.plans.due_s = None, None
        save_first(state, now, Resize())
    else:
        leave_or_stay(state, plan, now)


def node_status(state: JobState, node: Node, failures: int) -> NodeStatus:
    """Return a node as status shows it, with what is to be known of it beside its state."""
    ranks = tuple(holder.rank for holder in state.world.on(node.name))
    unwell = state.plans.unwell.get(node.name)
    seen = () if unwell is None else (f"{state.plans.what_is_wrong(node.name)}: {unwell.report.detail}", unwell.note)
    note = "; ".join(filter(None, (*seen, node.note)))
    prepared = () if node.state is NodeState.LOST else tuple(node.prepared.values())
    return NodeStatus(node.name, node.failure_domain, node.state.value, ranks, failures, note, prepared)


def all_finished(state: JobState, now: float) -> None:
    """Training was over before the boundary was reached: nothing is left to be changed."""
    why = "training finished before the step at which it was to stop"
    give_up(state, why, now)
    state.history.dismissed(now, why)
    state.enter(now)
