"""Something is wrong and no rank is at fault yet: wait for the culprit's own report, or read the step clocks.

Those who wait for a dead or stalled rank often report first. A moment later its exit is known, or the clocks of all
nodes tell who holds up the others.
"""

import msgspec

from ...protocol.types import CONTROLLER, Activity, FaultKind, FaultReport, RankProgress
from ...protocol.wording import ranks_text
from ..changes import step_clocks
from ..changes.generation import open_generation
from ..faults import SUSPICIONS, describe_clock, excused_ranks, moved_on, nobody_waits, stalled_ranks
from . import memory_faults
from .decision import blame, current_rung, decide, rung_failed, with_rank
from .state import JobState, Phase
from .world import DONE

ENOUGH_SUSPICIONS = 64
PROBE_S = 2.0  # a node that is heard, and does not read its clocks in this time, counts as silent


def suspect(state: JobState, report: FaultReport, now: float) -> None:
    """Note that something is wrong, and give the culprit's own report a moment to arrive."""
    known = state.phase is Phase.SUSPECTING
    if not _is_one_of_many(state, report):
        state.incident = state.incident.suspect(report)
    limit_s = state.policy.deadlines.suspect_s if report.kind in SUSPICIONS else memory_faults.patience_s(state)
    if not known:
        step_clocks.forget(state)  # what was asked for a suspicion that another fault has overtaken
        state.enter(now, limit_s)
    elif not state.clocks.awaited and state.due.phase_s is not None:
        state.due.phase_s = min(state.due.phase_s, now + limit_s)
    if report.kind is FaultKind.STALL and not state.clocks.awaited:
        _read_clocks(state, now, again=False)


def _is_one_of_many(state: JobState, report: FaultReport) -> bool:
    """Whether so many ranks have said the same that one more adds nothing: in a large job all of them say it."""
    suspicions = state.incident.suspicions
    many = report.kind in SUSPICIONS and len(suspicions) >= ENOUGH_SUSPICIONS
    return many and any(each.kind is report.kind for each in suspicions)


def answer_limit_s(state: JobState) -> float:
    """Return how long those that were asked about a suspicion may take to answer a controller that has taken over."""
    return _reading_limit_s(state) if state.clocks.awaited else state.policy.deadlines.suspect_s


def resolve_suspicion(state: JobState, now: float) -> None:
    """The time for the culprit to show itself is over: blame by the clocks, dismiss, link again, or ask the ladder."""
    if state.clocks.complete and not state.clocks.again and now - state.clocks.asked_s > PROBE_S:
        # What was read first says nothing of now: a cable may have been mended since.
        _read_clocks(state, now, again=True)
        return
    suspicions = state.incident.suspicions
    suspicion = next((each for each in suspicions if each.kind in SUSPICIONS), suspicions[0])
    silent = [holder.rank for name in state.clocks.awaited for holder in state.world.on(name)]
    clocks = {rank: clock for rank, clock in step_clocks.take(state).items() if not _waits_for_orders(clock)}
    median_s = max((clock.median_step_s for clock in clocks.values()), default=0.0)
    # Less than what was allowed to the step: it may have been well for up to a median before it stood still.
    limit_s = (state.policy.stall.factor - 1) * median_s + state.policy.stall.grace_s
    # On the way back all are at the same thing, and a newcomer's step says nothing: who does not hear the next order to
    # stop is found by that.
    judged = [clock for clock in clocks.values() if clock.suspended or state.phase_of_ranks is not Phase.REJOINING]
    stalled = stalled_ranks(judged, silent, limit_s)
    # Only a stall can turn out to be none; after a failed collective everybody waits for orders.
    harmless = (
        not stalled
        and not state.incident.culprits
        and state.phase_of_ranks in {Phase.RUNNING, Phase.RESUMING}
        and all(each.kind is FaultKind.STALL for each in suspicions)
    )
    if harmless and clocks and moved_on(clocks.values(), limit_s):
        _dismiss(state, "those that the others waited for have gone on meanwhile", now)
        return
    for rank in stalled:
        holder, clock = state.world.holders[rank], clocks.get(rank)
        named = with_rank(suspicion, rank, holder.node, holder.incarnation)
        named = msgspec.structs.replace(
            named,
            at_s=suspicion.at_s if clock is None else _since_s(clock, holder.started_s, suspicion.at_s, now),
            detail=f"rank {rank} holds up the others: {describe_clock(clock)}",
            seen_by=CONTROLLER,
        )
        state.remember(named, now)
        blame(state, named)
    for report in memory_faults.unheard(state):
        blame(state, report)
    excused = excused_ranks(clocks.values())
    if harmless and excused:
        _dismiss(state, f"{ranks_text(excused)}: a checkpoint is written, or the clock is paused", now)
    elif harmless and nobody_waits(clocks.values()) and not _first_step_awaited(state):
        _dismiss(state, "no rank waits for another: all are at work, and slower than usual together", now)
    elif not state.incident.culprits and state.phase_of_ranks is Phase.REJOINING and current_rung(state) is not None:
        _link_anew(state, suspicion, now)
    else:
        decide(state, now)


def _read_clocks(state: JobState, now: float, *, again: bool) -> None:
    step_clocks.ask(state)
    state.clocks.again, state.clocks.asked_s = again, now
    state.due.phase_s = now + _reading_limit_s(state)


def _reading_limit_s(state: JobState) -> float:
    return max(state.policy.deadlines.suspect_s, PROBE_S + _unheard_s(state))


def _unheard_s(state: JobState) -> float:
    """Return how long a node may be silent. Until then it may be cut off, and its ranks are not to blame for that."""
    return state.policy.heartbeat.interval_s * state.policy.heartbeat.missed


def _first_step_awaited(state: JobState) -> bool:
    """Whether ranks that have finished wait for the first step of others, which has no other deadline."""
    return state.phase_of_ranks is Phase.RESUMING and state.world.count(*DONE) > 0


def _since_s(clock: RankProgress, started_s: float, suspected_s: float, now: float) -> float:
    """Return since when a rank has held up the others: not after that was seen, and not before it was there."""
    return min(suspected_s, max(started_s, now - clock.activity_age_s))


def _waits_for_orders(clock: RankProgress) -> bool:
    """Whether a rank has left its step, and is not to blame for doing nothing: unless the kernel has stopped it."""
    return clock.activity is Activity.RECOVERING and not clock.suspended


def _dismiss(state: JobState, reason: str, now: float) -> None:
    """Nothing is wrong: back to where the suspicion came."""
    state.incident = state.incident.suspect_only()
    if state.history.open is not None and not state.history.open.decisions:
        state.history.dismissed(now, reason)
    limit_s = state.policy.deadlines.first_step_s if state.phase is Phase.RESUMING else None
    state.enter(now, limit_s)


def _link_anew(state: JobState, suspicion: FaultReport, now: float) -> None:
    """The communicators could not be built: try again under a fresh generation, all together, up to the limit."""
    limit = state.policy.communicator.link_up_attempts
    state.incident, again = state.incident.link_again(limit)
    if again:
        open_generation(state, (), now)
        return
    rung_failed(state, None, f"no communicators after {limit} attempts: {suspicion.detail}", now)
