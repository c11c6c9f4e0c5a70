"""What happens when time runs out. Every phase that waits has a deadline, and it ends here."""

from collections.abc import Callable

import msgspec

from ...protocol.types import CONTROLLER, FaultKind, FaultReport, Rung
from ...protocol.wording import ranks_text
from ..changes.boundary import late as late_at_the_boundary
from ..changes.boundary import not_stopped
from ..changes.drain import part_save_overdue
from ..changes.generation import faults_of, nodes_needed, release_held, start_if_possible
from ..changes.planned_changes import overdue as overdue_plan
from ..changes.promised_nodes import give_up_waiting
from ..changes.shutdown import end, saving_overdue
from ..changes.spares import refill_overdue
from ..recovery.decision import blame, blame_and_decide, rung_failed
from ..recovery.events import DeadlinePassed
from ..recovery.state import JobState, Phase
from ..recovery.suspicion import resolve_suspicion, suspect
from ..recovery.world import DONE, NodeState, RankState
from .nodes import nodes_missing
from .reports import take_up


def on_deadline(state: JobState, event: DeadlinePassed, now: float) -> None:
    """The present phase is over time."""
    if state.has_put_off:
        take_up(state, now)
    elif state.due.newcomers_s is not None and state.due.newcomers_s <= now:
        state.due.newcomers_s = None
        what = "has not reached its train function"
        starting = state.world.ranks(RankState.STARTING) - state.due.unplaced
        blame_and_decide(state, faults_of(state, starting, FaultKind.START_FAILED, what, now), now)
    elif state.due.devices_s is not None and state.due.devices_s <= now:
        state.due.devices_s = None
        _devices_not_well(state, now)
    elif state.due.nodes_s is not None and state.due.nodes_s <= now:
        state.due.nodes_s = None
        give_up_waiting(state)
        rung_failed(state, None, f"too few nodes came within {state.policy.deadlines.nodes_s:g} s", now)
    elif state.due.phase_s is not None and state.due.phase_s <= now:
        state.due.phase_s = None
        _OVERDUE[state.phase](state, now)
    elif state.phase is Phase.RUNNING or state.can_restart_larger:
        _planned(state, now)
    else:
        state.ignore("deadline that was met")


def _planned(state: JobState, now: float) -> None:
    """Time for what is planned; a suspicion or an incident comes first."""
    if state.plans.due_s is not None and state.plans.due_s <= now:
        overdue_plan(state, now)
    elif state.plans.grow_due_s is not None and state.plans.grow_due_s <= now:
        state.plans.grow_due_s = None  # it is looked at after every event
    elif state.arrivals.refill_due_s is not None and state.arrivals.refill_due_s <= now:
        refill_overdue(state, now)
    else:
        state.ignore("deadline that was met")


def _devices_not_well(state: JobState, now: float) -> None:
    """Faults that should have passed still stand: a new process on these devices would not do."""
    limit_s = state.policy.deadlines.device_s
    reasons = []
    for rank in sorted(state.due.held):
        fault = state.book.passing(state.world.holders[rank].node, rank)
        if fault is not None:
            blame(state, msgspec.structs.replace(fault, rank=rank))
            reasons.append(f"{fault.level} of the device of rank {rank} still stands after {limit_s:g} s")
    if reasons:
        rung_failed(state, Rung.RECOVER_IN_PLACE, "; ".join(reasons), now)
    else:
        release_held(state, now)


def _waiting(state: JobState, now: float) -> None:
    if len(state.world.named(NodeState.ACTIVE, NodeState.SPARE)) >= nodes_needed(state):
        state.arrivals.spares_awaited = False
        start_if_possible(state, now)
    else:
        give_up_waiting(state)
        nodes_missing(state, f"too few nodes came within {state.policy.deadlines.nodes_s:g} s", now)


def _quiescing(state: JobState, now: float) -> None:
    late = faults_of(state, not_stopped(state), FaultKind.UNRESPONSIVE, "did not quiesce", now)
    blame_and_decide(state, late, now)


def _pausing(state: JobState, now: float) -> None:
    if not part_save_overdue(state, now) and not late_at_the_boundary(state, now):
        _quiescing(state, now)


def _rejoining(state: JobState, now: float) -> None:
    limit_s = state.policy.deadlines.rejoin_s
    state.meeting.link_up_failed(state.world)
    _over_time(state, f"{state.world.count(RankState.REJOINING)} ranks not ready after {limit_s:g} s", now)


def _resuming(state: JobState, now: float) -> None:
    limit_s = state.policy.deadlines.first_step_s
    _over_time(state, f"no first step from {state.world.count(RankState.RESUMING)} ranks in {limit_s:g} s", now)


def _finishing(state: JobState, now: float) -> None:
    unfinished = sorted(set(range(state.world.size)) - state.world.ranks(*DONE))
    limit_s = state.policy.deadlines.finish_s
    end(state, 1, f"{ranks_text(unfinished)} did not finish within {limit_s:g} s of the others", now)


_OVERDUE: dict[Phase, Callable[[JobState, float], None]] = {
    Phase.WAITING: _waiting,
    Phase.SUSPECTING: resolve_suspicion,
    Phase.QUIESCING: _quiescing,
    Phase.PAUSING: _pausing,
    Phase.REJOINING: _rejoining,
    Phase.RESUMING: _resuming,
    Phase.SAVING: saving_overdue,
    Phase.RUNNING: _finishing,
    Phase.FINISHING: _finishing,
}


def _over_time(state: JobState, detail: str, now: float) -> None:
    """A phase in which ranks wait for each other is over time: find out who holds it up."""
    report = FaultReport(FaultKind.STALL, now, CONTROLLER, detail, generation=state.generation)
    state.remember(report, now)
    suspect(state, report, now)
