"""The two barriers and the resume: what happens when ranks answer.

Barrier one closes when every survivor has quiesced and every newcomer has joined; then the repair is planned and all
rejoin. Barrier two closes when all stand at one step; then all resume, and the incident ends when each has committed
the first new step.
"""

from collections.abc import Mapping

from ...protocol.errors import StateLost
from ...protocol.messages import (
    CheckpointSaved,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    Rejoin,
    Release,
    Resume,
    StepCommitted,
)
from ...protocol.types import (
    CONTROLLER,
    FaultKind,
    FaultReport,
    RepairPlan,
    RestoreSource,
    Rung,
    StepReport,
    rank_address,
)
from ..beginning import why_not_begin
from ..rank_states import DONE, RankEvent, RankState
from ..repair import plan_repair
from ..world import Holder, World
from .boundary import before_boundary
from .decision import blame_and_decide, rung_failed, stop_now
from .draining import part_saved
from .meeting import linked_up, rendezvous
from .planning import all_finished, rank_stopped
from .shutdown import ready_to_save
from .state import JobState, Phase

# Rungs that keep processes alive, and so depend on state that can be had from them.
KEEPING = (Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER)

# The first step after a resume is slow for newcomers, and the step clock does not judge it.
FIRST_STEP_FACTOR = 10.0
FIRST_STEP_GRACE_S = 30.0


def on_rank_joined(state: JobState, event: RankJoined, now: float) -> None:
    """A new process has reached its train function."""
    holder = _current(state, event.rank, event.incarnation)
    if holder is None or holder.state is not RankState.STARTING:
        state.ignore("joined twice or too late")
        return
    state.world.take(holder, RankEvent.JOINED)
    holder.resilient = True
    holder.heard(event.pid, now)
    holder.reported(event.report)
    holder.joined_generation = event.generation
    state.ever_resilient = True
    state.history.rank_phases(state.generation, event.rank, {"join": event.join_s})
    if state.phase is Phase.STARTING and state.newcomers_due_s is None:
        state.newcomers_due_s = now + state.policy.deadlines.start_s
    barrier_one(state, now)


def on_rank_quiesced(state: JobState, event: RankQuiesced, now: float) -> None:
    """A survivor has stopped and cleaned."""
    holder = _current(state, event.rank, event.incarnation)
    if holder is None or event.generation != state.generation or holder.state is not RankState.QUIESCING:
        state.ignore("quiesced in another generation")
        return
    if state.phase is Phase.PAUSING and before_boundary(state, event.report.committed):
        state.ignore("quiesced before the boundary")
        return
    state.world.take(holder, RankEvent.QUIESCED)
    holder.reported(event.report)
    holder.committed = max(holder.committed, event.report.committed)
    state.committed = max(state.committed, event.report.committed)
    state.history.rank_phases(state.generation, event.rank, event.phases_s)
    if state.phase is Phase.SAVING:
        ready_to_save(state, now)
        return
    if state.phase is Phase.PAUSING:
        rank_stopped(state, now)
    if state.phase is Phase.QUIESCING:
        barrier_one(state, now)


def on_part_saved(state: JobState, event: CheckpointSaved, now: float) -> None:
    """A rank has written what goes with those that leave at the boundary."""
    part_saved(state, event, now)
    if state.phase is Phase.QUIESCING:
        barrier_one(state, now)


def barrier_one(state: JobState, now: float) -> None:
    """When all have answered: plan the repair, and have everybody rejoin."""
    world = state.world
    if not world.count(RankState.STARTING):
        state.newcomers_due_s = None
    if world.count(RankState.STARTING, RankState.QUIESCING):
        return
    reports = {holder.rank: holder.report for holder in world.holders if holder.report is not None}
    try:
        state.plan = plan_repair(reports, world.places(), state.policy.restore, state.incident.trusted_step)
        _refuse_remains(world, state.plan)
    except StateLost as lost:
        for rung in KEEPING:
            rung_failed(state, rung, str(lost), now, decide_now=rung is KEEPING[-1])
        return
    plan = state.plan
    if plan.target_step == 0 and (refused := _why_not_begin(state, reports)):
        state.plan = None
        stop_now(state, refused, now)
        return
    remark, state.plans.remark = state.plans.remark, ""
    reasons = (remark, *plan.reasons) if remark else plan.reasons
    state.history.planned(plan.restore, reasons, plan.target_step, state.committed)
    for holder in world.holders:
        world.take(holder, RankEvent.REJOIN_ORDERED)
        state.send(rank_address(holder.rank), rejoin_command(state, holder))
    state.enter(Phase.REJOINING, now, state.policy.deadlines.rejoin_s)


def _why_not_begin(state: JobState, reports: Mapping[int, StepReport]) -> str:
    survivors = state.world.in_state(RankState.QUIESCED)  # whose step 0 is then repeated, and is that of this training
    return why_not_begin(
        reports,
        restore=state.policy.restore,
        trusted_step=state.incident.trusted_step,
        begin_again=state.policy.checkpoint.begin_again,
        marked_before=state.committed > 0 and state.policy.checkpoint.every_steps > 0 and not survivors,
    )


def _refuse_remains(world: World, plan: RepairPlan) -> None:
    """Training begins anew only in processes that hold what their script made: no half of a repair may remain."""
    remains = [h.rank for h in world.in_state(RankState.QUIESCED) if h.report is not None and not h.report.clean]
    if plan.restore is RestoreSource.NOTHING and remains:
        ranks = ", ".join(map(str, remains))
        raise StateLost(f"no state is left but the half-repaired one of rank {ranks}; nothing may begin from that")


def rejoin_command(state: JobState, holder: Holder) -> Rejoin:
    """Return a rank's own part of the plan, as a command."""
    assert state.plan is not None
    return Rejoin(
        rank=holder.rank,
        generation=state.generation,
        store=rendezvous(state),
        connected=holder.connected and holder.joined_generation == state.generation,
        part=state.plan.parts[holder.rank],
    )


def on_rank_ready(state: JobState, event: RankReady, now: float) -> None:
    """A rank is rebuilt, repaired and rolled back."""
    holder = _current(state, event.rank, event.incarnation)
    if holder is None or event.generation != state.generation or holder.state is not RankState.REJOINING:
        state.ignore("ready in another generation")
        return
    assert state.plan is not None
    if event.step != state.plan.target_step:
        _came_back_wrong(state, holder, event.step, state.plan.target_step, now)
        return
    state.world.take(holder, RankEvent.READY)
    holder.committed = event.step
    state.history.rank_phases(state.generation, event.rank, event.phases_s)
    state.history.moved(event.bytes_received)
    if state.world.count(RankState.REJOINING):
        return
    linked_up(state)
    for each in state.world.holders:
        state.world.take(each, RankEvent.RESUME_ORDERED)
        state.send(rank_address(each.rank), Resume(each.rank, state.generation, event.step))
    state.committed = event.step
    limit_s = _first_step_limit_s(state)
    state.first_steps_at_s = state.median_step_s = 0.0
    state.enter(Phase.RESUMING, now, limit_s)


def _came_back_wrong(state: JobState, holder: Holder, step: int, target_step: int, now: float) -> None:
    """A rank is not where it was told to go: it is at fault, and nobody else."""
    report = FaultReport(
        kind=FaultKind.CORRUPTION,
        at_s=now,
        seen_by=CONTROLLER,
        detail=f"it came back at step {step}, all others go to {target_step}",
        rank=holder.rank,
        node=holder.node,
        generation=state.generation,
        incarnation=holder.incarnation,
    )
    blame_and_decide(state, [report], now)


def _first_step_limit_s(state: JobState) -> float:
    """How long the first step may take: no longer than the policy says, and less where the usual step is known."""
    limit_s = state.policy.deadlines.first_step_s
    if state.median_step_s > 0:
        limit_s = min(limit_s, FIRST_STEP_FACTOR * state.median_step_s + FIRST_STEP_GRACE_S)
    return limit_s


def on_step_committed(state: JobState, event: StepCommitted, now: float) -> None:
    """A rank has committed its first step since the resume."""
    holder = _answers(state, event.rank, event.incarnation, event.generation)
    if holder is None:
        state.ignore("step of another generation")
        return
    state.committed = max(state.committed, event.committed)
    if event.median_step_s > 0:  # a newcomer's history is its slow first step, so the least is the best informed
        known = state.median_step_s or event.median_step_s
        state.median_step_s = min(known, event.median_step_s)
    state.first_steps_at_s = max(state.first_steps_at_s, event.at_s)
    state.world.take(holder, RankEvent.STEP_COMMITTED)
    _maybe_resumed(state, now)


def on_rank_finished(state: JobState, event: RankFinished, now: float) -> None:
    """A rank's train function has returned; it stays until all have."""
    holder = _answers(state, event.rank, event.incarnation, event.generation)
    if holder is None:
        state.ignore("finished in another generation")
        return
    state.world.take(holder, RankEvent.FINISHED)
    holder.committed = max(holder.committed, event.committed)
    state.committed = max(state.committed, event.committed)
    state.first_steps_at_s = max(state.first_steps_at_s, now)
    _maybe_resumed(state, now)
    if state.phase is Phase.PAUSING and _all_done(state):
        all_finished(state, now)
    if state.phase is not Phase.RUNNING:
        return
    if _all_done(state):
        _release(state, now)
    else:
        state.due_s = state.due_s or now + state.policy.deadlines.finish_s


def go_on(state: JobState, now: float) -> None:
    """A suspicion came to nothing: what was waited for may have come meanwhile, and is not said twice."""
    _maybe_resumed(state, now)
    if state.phase is Phase.RUNNING and _all_done(state):
        _release(state, now)


def _all_done(state: JobState) -> bool:
    return state.world.count(*DONE) == state.world.size


def _release(state: JobState, now: float) -> None:
    """All have finished: let their processes end."""
    for each in state.world.holders:
        state.world.take(each, RankEvent.RELEASE_ORDERED)
        state.send(rank_address(each.rank), Release(each.rank, state.generation))
    state.enter(Phase.FINISHING, now, state.policy.deadlines.finish_s)


def _maybe_resumed(state: JobState, now: float) -> None:
    if state.phase is not Phase.RESUMING or state.world.count(RankState.RESUMING):
        return
    state.history.resumed(state.first_steps_at_s, state.world.pids(), state.median_step_s)
    state.close_incident()
    state.enter(Phase.RUNNING, now)


def _current(state: JobState, rank: int, incarnation: int) -> Holder | None:
    """Return the holder of a rank if the report comes from its present process."""
    if not 0 <= rank < state.world.size:
        return None
    holder = state.world.holders[rank]
    return holder if holder.incarnation == incarnation else None


def _answers(state: JobState, rank: int, incarnation: int, generation: int) -> Holder | None:
    holder = _current(state, rank, incarnation)
    return holder if holder is not None and generation == state.generation else None
