"""What follows when ranks stand together: rules that hold after every event, whichever came last.

Barrier one closes when every survivor has quiesced and every newcomer has joined; then the repair is planned and all
rejoin. Barrier two closes when all stand at one step; then all resume, and the incident ends when each has committed
the first new step. Handlers only note what each rank answers; a suspicion that is dismissed, or an order in which
answers come, needs no rule of its own.
"""

from collections.abc import Callable, Mapping

import msgspec

from ...protocol.errors import StateLost
from ...protocol.messages import Rejoin, Release, Resume
from ...protocol.types import FaultKind, RepairPlan, RestoreSource, Rung, StepReport, rank_address
from ...protocol.wording import ranks_text
from ..changes.boundary import consider
from ..changes.generation import faults_of
from ..changes.planned_changes import all_finished, all_stopped, make_change
from ..changes.promised_nodes import has_come, place
from ..changes.shutdown import all_parked, end, save
from ..recovery.decision import blame_and_decide, rung_failed, stop_now
from ..recovery.repair import choose_links, plan_repair, uses_devices, why_not_begin
from ..recovery.state import OVER, JobState, Phase
from ..recovery.suspicion import resolve_suspicion
from ..recovery.world import DONE, PARKED, Holder, RankEvent, RankState, World

MOST_IN_A_ROW = 20  # rules after one event: each leads to another phase, and no way through them is that long
UNSETTLED = "rules that do not settle"

# Rungs that keep processes alive, and so depend on state that can be had from them.
KEEPING = (Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER)

# The first step after a resume is slow for newcomers, and the step clock does not judge it.
FIRST_STEP_FACTOR = 10.0
FIRST_STEP_GRACE_S = 30.0


def _blame_those_that_left(state: JobState, now: float) -> None:
    """A process has ended well without training, and others wait for it in front of their train function."""
    what = "ended with status 0 before it reached its train function, in front of which others wait for it"
    left = faults_of(state, state.world.ranks(RankState.EXITED), FaultKind.EXIT, what, now)
    blame_and_decide(state, left, now)


def _plan_repair(state: JobState, now: float) -> None:
    """Barrier one has closed: plan the repair, and have all ranks rejoin."""
    world = state.world
    reports = {holder.rank: holder.report for holder in world.holders if holder.report is not None}
    try:
        plan = plan_repair(reports, world.places(), state.policy.restore, state.incident.trusted_step)
        plan = choose_links(plan, state.policy.communicator, tried=state.incident.over_devices)
        _refuse_remains(world, plan)
    except StateLost as lost:
        for rung in KEEPING:
            rung_failed(state, rung, str(lost), now, decide_now=rung is KEEPING[-1])
        return
    if plan.target_step == 0 and (refused := _why_not_begin(state, reports)):
        stop_now(state, refused, now)
        return
    state.plan = plan
    if uses_devices(plan):
        state.incident = state.incident.repair_over_devices()
    remark, state.plans.remark = state.plans.remark, ""
    reasons = (remark, *plan.reasons) if remark else plan.reasons
    progress = state.progress
    state.history.planned(plan.restore, reasons, plan.target_step, progress.committed, is_current=progress.is_current)
    for holder in world.holders:
        world.take(holder, RankEvent.REJOIN_ORDERED)
        state.send(rank_address(holder.rank), rejoin_command(state, holder))
    state.enter(now, state.policy.deadlines.rejoin_s)


def _why_not_begin(state: JobState, reports: Mapping[int, StepReport]) -> str:
    survivors = state.world.in_state(RankState.QUIESCED)  # whose step 0 is then repeated, and is that of this training
    return why_not_begin(
        reports,
        restore=state.policy.restore,
        trusted_step=state.incident.trusted_step,
        begin_again=state.policy.checkpoint.begin_again,
        marked_before=state.progress.committed > 0 and state.policy.checkpoint.every_steps > 0 and not survivors,
    )


def _refuse_remains(world: World, plan: RepairPlan) -> None:
    """Training begins again only in processes that hold what their script made: no half of a repair may remain."""
    remains = [h.rank for h in world.in_state(RankState.QUIESCED) if h.report is not None and not h.report.clean]
    if plan.restore is RestoreSource.NOTHING and remains:
        raise StateLost(
            f"no state is left but the half-repaired one of {ranks_text(remains)}; nothing may begin from that"
        )


def rejoin_command(state: JobState, holder: Holder) -> Rejoin:
    """Return a rank's own part of the plan, as a command."""
    assert state.plan is not None
    return Rejoin(
        rank=holder.rank,
        generation=state.generation,
        store=state.rendezvous(),
        connected=holder.connected and holder.joined_generation == state.generation,
        part=state.plan.parts[holder.rank],
    )


def _first_step_limit_s(state: JobState) -> float:
    """How long the first step may take: no longer than the policy says, and less where the usual step is known."""
    limit_s = state.policy.deadlines.first_step_s
    if state.progress.median_step_s > 0:
        limit_s = min(limit_s, FIRST_STEP_FACTOR * state.progress.median_step_s + FIRST_STEP_GRACE_S)
    return limit_s


def _resume(state: JobState, now: float) -> None:
    """Barrier two has closed: all train on."""
    assert state.plan is not None
    state.meeting.linked_up(state.world)
    step = state.plan.target_step
    for each in state.world.holders:
        state.world.take(each, RankEvent.RESUME_ORDERED)
        state.send(rank_address(each.rank), Resume(each.rank, state.generation, step))
    state.progress.committed, state.progress.is_current = step, False
    limit_s = _first_step_limit_s(state)
    state.progress.first_steps_at_s = state.progress.median_step_s = 0.0
    state.enter(now, limit_s)


def _close(state: JobState, now: float) -> None:
    """Each rank has committed its first step: the incident is over."""
    state.history.resumed(state.progress.first_steps_at_s, state.world.pids(), state.progress.median_step_s)
    state.close_incident()
    state.plan = None
    state.enter(now)


def _limit_finish(state: JobState, now: float) -> None:
    """Some have finished: the others have so long to do so."""
    state.due.phase_s = now + state.policy.deadlines.finish_s


def _release(state: JobState, now: float) -> None:
    """All have finished: let their processes end."""
    for each in state.world.holders:
        state.world.take(each, RankEvent.RELEASE_ORDERED)
        state.send(rank_address(each.rank), Release(each.rank, state.generation))
    state.enter(now, state.policy.deadlines.finish_s)


def _end(state: JobState, now: float) -> None:
    end(state, 0, "all ranks have finished", now)


# --- the rules ------------------------------------------------------------------------------------------------


def _some_have_left(state: JobState) -> bool:
    waits = state.world.has(RankState.JOINED, RankState.QUIESCING, RankState.QUIESCED)
    return waits and state.world.has(RankState.EXITED)


def _all(*states: RankState) -> Callable[[JobState], bool]:
    return lambda state: state.world.count(*states) == state.world.size


def _none(*states: RankState) -> Callable[[JobState], bool]:
    return lambda state: not state.world.has(*states)


def _clocks_are_read(state: JobState) -> bool:
    return state.clocks.complete


def _finish_is_unlimited(state: JobState) -> bool:
    return state.due.phase_s is None and state.world.has(*DONE)


class Rule(msgspec.Struct, frozen=True):
    """In one of `phases`, once `holds` is true, `then` is done, which makes it false."""

    phases: frozenset[Phase]
    holds: Callable[[JobState], bool]
    then: Callable[[JobState, float], None]


RULES: tuple[Rule, ...] = (
    Rule(frozenset({Phase.QUIESCING}), has_come, place),
    Rule(frozenset({Phase.STARTING, Phase.QUIESCING}), _some_have_left, _blame_those_that_left),
    Rule(frozenset({Phase.STARTING, Phase.QUIESCING}), _all(*PARKED), _plan_repair),
    Rule(frozenset({Phase.REJOINING}), _all(RankState.READY), _resume),
    Rule(frozenset({Phase.RESUMING}), _none(RankState.RESUMING), _close),
    Rule(frozenset({Phase.SUSPECTING}), _clocks_are_read, resolve_suspicion),
    Rule(frozenset({Phase.RUNNING, Phase.PAUSING}), _clocks_are_read, consider),
    Rule(frozenset({Phase.PAUSING}), _all(*DONE), all_finished),
    Rule(frozenset({Phase.PAUSING}), all_stopped, make_change),
    Rule(frozenset({Phase.RUNNING}), _all(*DONE), _release),
    Rule(frozenset({Phase.RUNNING}), _finish_is_unlimited, _limit_finish),
    Rule(frozenset({Phase.SAVING}), all_parked, save),
    Rule(frozenset(Phase) - OVER, _all(RankState.EXITED), _end),
)


def advance(state: JobState, now: float) -> None:
    """Do what follows from how the ranks stand together, until nothing does. Runs after every event."""
    if state.due.newcomers_s is not None and not state.world.has(RankState.STARTING):
        state.due.newcomers_s = None
    if not state.due.unplaced:
        state.due.nodes_s = None
    for _ in range(MOST_IN_A_ROW):
        phase = state.phase
        rule = next((each for each in RULES if phase in each.phases and each.holds(state)), None)
        if rule is None:
            return
        rule.then(state, now)
    state.ignore(UNSETTLED)
