"""What ranks answer on the way through a recovery: each answer is noted, and nothing follows from it alone.

What follows when enough of them have answered is in `barriers.py`.
"""

from ...protocol.messages import RankFinished, RankJoined, RankQuiesced, RankReady, StepCommitted
from ...protocol.types import CONTROLLER, FaultKind, FaultReport
from ..changes.boundary import before_boundary
from ..changes.boundary import stopped as begin_at_the_boundary
from ..recovery.decision import blame_and_decide
from ..recovery.state import JobState, Phase
from ..recovery.world import Holder, RankEvent, RankState


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
    if state.phase is Phase.STARTING and state.due.newcomers_s is None:
        state.due.newcomers_s = now + state.policy.deadlines.start_s


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
    state.progress.heard(event.report.committed)
    state.history.rank_phases(state.generation, event.rank, event.phases_s)
    if state.phase is Phase.PAUSING:
        begin_at_the_boundary(state, now)


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
    state.history.moved(event.bytes_received, over_devices=event.bytes_over_devices)


def _came_back_wrong(state: JobState, holder: Holder, step: int, target_step: int, now: float) -> None:
    """A rank is not where it was ordered to go: it is at fault, and no other."""
    what, generation = f"it came back at step {step}, all others go to {target_step}", state.generation
    report = FaultReport.of_rank(
        FaultKind.CORRUPTION, what, holder, node=holder.node, generation=generation, seen_by=CONTROLLER, at_s=now
    )
    blame_and_decide(state, [report], now)


def on_step_committed(state: JobState, event: StepCommitted, now: float) -> None:
    """A rank has committed its first step since the resume."""
    holder = _answers(state, event.rank, event.incarnation, event.generation)
    if holder is None:
        state.ignore("step of another generation")
        return
    state.progress.committed = max(state.progress.committed, event.committed)
    if event.median_step_s > 0:  # a newcomer's history is its slow first step, so the least is the best informed
        known = state.progress.median_step_s or event.median_step_s
        state.progress.median_step_s = min(known, event.median_step_s)
    state.progress.first_steps_at_s = max(state.progress.first_steps_at_s, event.at_s)
    state.world.take(holder, RankEvent.STEP_COMMITTED)


def on_rank_finished(state: JobState, event: RankFinished, now: float) -> None:
    """A rank's train function has returned; it stays until all have."""
    holder = _answers(state, event.rank, event.incarnation, event.generation)
    if holder is None:
        state.ignore("finished in another generation")
        return
    state.world.take(holder, RankEvent.FINISHED)
    holder.committed = max(holder.committed, event.committed)
    state.progress.heard(event.committed)
    state.progress.first_steps_at_s = max(state.progress.first_steps_at_s, now)


def _current(state: JobState, rank: int, incarnation: int) -> Holder | None:
    """Return the holder of a rank if the report comes from its present process."""
    if not 0 <= rank < state.world.size:
        return None
    holder = state.world.holders[rank]
    return holder if holder.incarnation == incarnation else None


def _answers(state: JobState, rank: int, incarnation: int, generation: int) -> Holder | None:
    holder = _current(state, rank, incarnation)
    return holder if holder is not None and generation == state.generation else None
