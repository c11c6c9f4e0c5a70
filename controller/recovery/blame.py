"""TOPIC: who is at fault. Reports are sorted, suspicions are looked into, and ranks are held at fault.

Those who wait for a dead or stalled rank often report first. So a suspicion (a collective that failed, a stall, a link
that does not come up) waits for the culprit's own report; a moment later its exit is known, or the step clocks of all
nodes tell who holds up the others.

Struck memory is seen twice: by the cluster's detector, and a moment later by the process that touches it. The process
knows more: whether it lives on and can mend itself. So the detector's report waits for its word, as a suspicion does,
and a report that comes after that word is the same fault once more.
"""

from collections.abc import Collection, Iterable, Iterator

import msgspec

from ...policies.budgets import NodeFailure, in_window
from ...policies.fault_codes import TREATMENTS, Treatment, asks_to_leave
from ...policies.schema import StallPolicy
from ...protocol import messages as m
from ...protocol.types import (
    CONTROLLER,
    Activity,
    FaultKind,
    FaultReport,
    RankProgress,
    Rung,
    node_address,
    rank_address,
)
from ...protocol.wording import describe_clock, describe_exit, ranks_text, summary_line
from . import topic as do
from .incident import Verdict
from .orders import ask_for_clocks
from .state import EXCUSED, OVER, JobState, Phase
from .topic import ALIVE, Owed, PhaseLimit, Recs, Row, Rule, Topic
from .world import AT_WORK, DONE, GONE, Holder, RankEvent, RankState

# The rank that says so is most likely not the one at fault: ranks that wait for a dead or stalled rank report first.
SUSPICIONS = frozenset({FaultKind.COMMUNICATION, FaultKind.STALL, FaultKind.LINK_UP})
ENOUGH_SUSPICIONS = 64
PROBE_S = 2.0  # a node that is heard, and does not read its clocks in this time, counts as silent

MEMORY_WAIT_MOST_S = 10.0  # a process notices within the step that it is in, and a long one is not waited for
SAME_FAULT_S = 30.0  # a detector that speaks later than this after the process means something new
_STRUCK = frozenset({FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT})
_TRAINING = frozenset({Phase.RUNNING, Phase.RESUMING, Phase.SUSPECTING})


# --- reports ----------------------------------------------------------------------------------------------------------


def _on_process_exited(state: JobState, event: m.ProcessExited) -> Recs:
    """Take in that a training process has ended: well, or as a fault."""
    process, how = event.process, describe_exit(event.status, out_of_memory=event.out_of_memory)
    if state.planned.newcomer(process.rank, process.incarnation) is not None:
        return [do.NewcomerFailed(process.rank, how)]
    holder = state.world.holder(process.rank)
    if holder is None or process.incarnation != holder.incarnation or holder.state in GONE:
        state.ignore("exit of an earlier process")
        return None
    if event.last is not None and event.last.incarnation == process.incarnation:
        state.progress.heard(event.last.step)
    if event.status == 0 and (holder.state is RankState.RELEASED or not holder.resilient):
        state.world.take(holder, RankEvent.EXITED)
        holder.pid = 0
        return None
    if holder.state is RankState.RELEASED:
        reason = f"rank {holder.rank} failed after training had finished: {how}"
        return [do.EndNow(event.status if event.status > 0 else 1, reason)]
    if state.phase is Phase.SAVING:
        return [do.LostWhileSaving((holder.rank,), how)]
    kind, by = FaultKind.OUT_OF_MEMORY if event.out_of_memory else FaultKind.EXIT, node_address(event.node)
    report = FaultReport(
        kind, event.at_s, by, how, holder.rank, holder.node, state.generation, process.incarnation, output=event.output
    )
    return [do.TakeFault(report), do.Gone((holder.rank,), process.incarnation)]


def _take_fault(state: JobState, rec: do.TakeFault) -> Recs:
    """Drop what is stale, put off what has no world, remember the rest: blame, or wait for the culprit."""
    report = rec.report
    if report.kind is FaultKind.UNRESPONSIVE and _is_seen_to(state, report):
        return None
    if state.phase in {*OVER, Phase.WAITING}:
        _put_off(state, report)
        return None
    stale = _stale(state, report) or (_past_suspicion(state, report) if report.kind in SUSPICIONS else None)
    if stale is not None:
        state.ignore(stale)
        return None
    if report.kind is FaultKind.LINK_UP:
        state.meeting.link_up_failed(state.world)
    if state.incident.verdict(report.rank) is Verdict.CULPRIT:
        state.ignore("fault of a rank that is being replaced")
        return None
    if report.kind in SUSPICIONS or (report.kind in _STRUCK and _is_awaited(state, report)):
        state.remember(report)
        return _suspect(state, do.Suspect(report))
    return [do.Blame(report), do.Decide()]


def _is_seen_to(state: JobState, report: FaultReport) -> bool:
    """An agent sees that a process is stopped: say whether that is left as it is, or seen to here.

    No wait for it is worth its time, in any phase in which it is needed. A script that is not resilient is left as it
    is, as by torchrun: a person may be looking at it with a debugger.
    """
    holder = None if report.rank is None else state.world.holder(report.rank)
    if not state.ever_resilient:
        state.ignore("process that is stopped, of a script that is not resilient")
    elif holder is not None and holder.state in DONE and report.incarnation == holder.incarnation:
        state.ignore("process that is stopped, of a rank that has finished")  # its exit has a deadline
    elif state.phase is Phase.SAVING and holder is not None and _stale(state, report) is None:
        # The others save without it as soon as its end is known.
        state.send(node_address(holder.node), m.StopProcess(holder.rank, holder.incarnation, grace_s=0.0))
    else:
        return False
    return True


def _put_off(state: JobState, report: FaultReport) -> None:
    """Nothing can be done now: keep what will have to be left, for when there is a world again."""
    state.ignore(f"fault while {state.phase}")
    if asks_to_leave(report) and (state.phase is Phase.WAITING or state.saving.before_a_start):
        state.book.put_off_for_later(report)


def _stale(state: JobState, report: FaultReport) -> str | None:
    """Say why a report is about what is no longer there, or is known; None when it is news."""
    if report.rank is None:
        return None
    holder = state.world.holder(report.rank)
    earlier = holder is None or (report.incarnation and report.incarnation != holder.incarnation)
    if earlier and not asks_to_leave(report):  # what is wrong with a device is so for each process on it
        return "fault of an earlier process"
    if holder is None or (report.node and holder.node and report.node != holder.node):
        return "fault on a node that the rank has left"
    if report.kind in _STRUCK and _from_outside(report) and _is_known(state, report, holder):
        return "fault of memory that its process has reported, or that is older than it"
    return None


def _past_suspicion(state: JobState, report: FaultReport) -> str | None:
    """Say why a suspicion is over already, perhaps as it was long on its way; None when it is to be looked into."""
    if state.phase in {Phase.QUIESCING, Phase.STARTING}:
        return "suspicion while everybody is being stopped"
    if 0 < report.generation < state.generation:
        return "suspicion of an earlier generation"
    if report.kind is not FaultKind.STALL or state.phase is Phase.SUSPECTING:
        return None
    if state.phase is Phase.FINISHING:
        return "stall of a step that is over"
    return "stall from before the clocks were read last" if report.at_s < state.clocks.asked_s else None


# --- blame ------------------------------------------------------------------------------------------------------------


def _blame(state: JobState, rec: do.Blame) -> Recs:
    """Hold a rank, or all ranks of a node, at fault. A replacement that is lost again calls for another attempt."""
    report = rec.report
    if not rec.known:
        state.remember(report)
    ranks = [holder.rank for holder in state.world.on(report.node or "")] if report.rank is None else [report.rank]
    state.incident, nodes = state.incident.failed({rank: state.world.holders[rank].node for rank in ranks})
    failures = [*state.accounts.node_failures, *(NodeFailure(name, state.now) for name in nodes)]
    window_s = state.policy.node.window_s
    state.accounts.node_failures = [each for each in failures if in_window(each.at_s, window_s, state.now)]
    if report.trusted_step is not None:
        state.incident = state.incident.doubt(report.trusted_step)
    for rank in ranks:
        if report.kind in _STRUCK and not _from_outside(report):
            state.world.holders[rank].memory_fault_s = state.now
        if any(each.rank == rank for each in state.incident.suspicions):  # the word of its process is there
            still = (each for each in state.incident.suspicions if not (each.rank == rank and _from_outside(each)))
            state.incident = state.incident.suspect_only(still)
        verdict = state.incident.verdict(rank)
        if not report.mendable or not state.world.holders[rank].resilient or verdict is Verdict.CULPRIT:
            state.incident = state.incident.blame(rank, report)
            continue
        if verdict is Verdict.MENDED:
            reason = f"{report.kind} again in rank {rank}, which had mended itself: {summary_line(report.detail)}"
            state.incident = state.incident.rule_out(Rung.RETRY_STEP, reason)
        state.incident = state.incident.let_mend(rank, report)
    return None


# --- struck memory ----------------------------------------------------------------------------------------------------


def _is_known(state: JobState, report: FaultReport, holder: Holder) -> bool:
    """Say whether a detector reports what the process has told already, or what struck the one before it.

    What a detector says soon after a process was replaced is about the one before it: a process that is hurt all the
    same says so itself.
    """
    if report.at_s < holder.started_s + (SAME_FAULT_S if holder.incarnation > 1 else 0.0):
        return True
    if state.incident.verdict(report.rank) in {Verdict.MENDING, Verdict.MENDED}:
        return True
    said_s = holder.memory_fault_s
    return said_s is not None and state.now - said_s <= SAME_FAULT_S


def _is_awaited(state: JobState, report: FaultReport) -> bool:
    """Say whether the process that a detector speaks of trains, and so will come upon the fault by itself."""
    if report.rank is None or not _from_outside(report) or state.phase not in _TRAINING:
        return False
    holder = state.world.holders[report.rank]
    return holder.resilient and holder.state in AT_WORK


def _from_outside(report: FaultReport) -> bool:
    """Return whether a detector says that memory was struck, and no worse than that a new process there would do."""
    if report.rank is None or report.mendable or report.seen_by == rank_address(report.rank):
        return False  # no detector can know what a process can mend
    return report.kind in _STRUCK and TREATMENTS[report.level] is Treatment.RESTART


# --- suspicion --------------------------------------------------------------------------------------------------------


def _suspect(state: JobState, rec: do.Suspect) -> Recs:
    """Note that something is wrong, and give the culprit's own report a moment to arrive."""
    report, known, suspicions = rec.report, state.phase is Phase.SUSPECTING, state.incident.suspicions
    # In a large job all ranks say the same: one more adds nothing then.
    enough = report.kind in SUSPICIONS and len(suspicions) >= ENOUGH_SUSPICIONS
    if not (enough and any(each.kind is report.kind for each in suspicions)):
        state.incident = state.incident.suspect(report)
    limit_s = state.policy.deadlines.suspect_s
    if report.kind not in SUSPICIONS:
        limit_s += min(state.progress.median_step_s, MEMORY_WAIT_MOST_S)
    if not known:
        state.clocks.forget()  # what was asked for a suspicion that another fault has overtaken
        state.enter(limit_s)
    elif not state.clocks.awaited and state.due.phase_s is not None:
        state.hurry(state.now + limit_s)
    if report.kind is FaultKind.STALL and not state.clocks.awaited:
        _read_clocks(state, again=False)
    return None


def _read_clocks(state: JobState, *, again: bool) -> None:
    ask_for_clocks(state)
    state.clocks.again, state.clocks.asked_s = again, state.now
    state.limit(_reading_limit_s(state))


def _ask_nodes(state: JobState, _: do.AskNodes) -> Recs:
    """Wait for what the agents' own connections know: a node that is lost may be heard of only now."""
    _read_clocks(state, again=True)
    return None


def _reading_limit_s(state: JobState) -> float:
    """Return how long a reading may take: a node that is cut off may be silent so long, and is not to blame for it."""
    unheard_s = state.policy.heartbeat.interval_s * state.policy.heartbeat.missed
    return max(state.policy.deadlines.suspect_s, PROBE_S + unheard_s)


def _on_progress_reported(state: JobState, event: m.ProgressReported) -> Recs:
    """Take in that a node has read its step clocks, for a suspicion or for a boundary."""
    clocks = state.clocks
    if event.probe != clocks.probe or event.node not in clocks.awaited:
        state.ignore("progress of an earlier probe")
        return None
    clocks.awaited.discard(event.node)
    for clock in event.ranks:
        holder = state.world.holder(clock.rank)
        if holder is not None and clock.incarnation == holder.incarnation:
            clocks.read[clock.rank] = clock
        state.progress.heard(clock.step)
    clocks.complete = not clocks.awaited
    return None


def _resolve(state: JobState) -> Recs:
    """The time for the culprit to show itself is over: blame by the clocks, dismiss, link again, or ask the ladder."""
    hasty = not state.clocks.complete and not state.clocks.awaited
    apart = state.phase_of_ranks is Phase.RUNNING and read_apart(state.clocks.read.values())
    old = apart or state.now - state.clocks.asked_s > PROBE_S
    if state.clocks.complete and not state.clocks.again and old:
        # What was read first says nothing of now: a cable may have been mended since.
        _read_clocks(state, again=True)
        return None
    suspicions = state.incident.suspicions
    suspicion = next((each for each in suspicions if each.kind in SUSPICIONS), suspicions[0])
    silent = [holder.rank for name in state.clocks.awaited for holder in state.world.on(name)]
    # A rank that has left its step is not to blame for doing nothing, unless the kernel has stopped it.
    clocks = {
        rank: clock
        for rank, clock in state.clocks.take().items()
        if clock.activity is not Activity.RECOVERING or clock.suspended
    }
    limit_s = _still_for_s(state.policy.stall, clocks.values())
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
        return _dismiss(state, "those that the others waited for have gone on meanwhile")
    for rank in stalled:
        _blame_by_clock(state, rank, clocks.get(rank), suspicion)
    for report in [each for each in state.incident.suspicions if _from_outside(each)]:
        _blame(state, do.Blame(report, known=True))  # no process has spoken to it: it counts as it is
    excused = excused_ranks(clocks.values())
    if harmless and excused:
        return _dismiss(state, f"{ranks_text(excused)}: a checkpoint is written, or the clock is paused")
    # Where ranks that have finished wait for the first step of others, that has no other deadline.
    first_step_awaited = state.phase_of_ranks is Phase.RESUMING and state.world.has(*DONE)
    if harmless and nobody_waits(clocks.values()) and not first_step_awaited:
        return _dismiss(state, "no rank waits for another: all are at work, and slower than usual together")
    if not state.incident.culprits and state.phase_of_ranks is Phase.REJOINING and state.rung is not None:
        return _link_anew(state, suspicion)
    return [do.Decide(hasty=hasty and not state.incident.culprits)]


def _still_for_s(stall: StallPolicy, clocks: Collection[RankProgress]) -> float:
    """Return how long a rank may be at one thing, by the most that any rank allows a step.

    Less than the whole step may take: it may have been well for up to a median before it stood still.
    """
    median_s = max((clock.median_step_s for clock in clocks), default=0.0)
    by_policy_s = stall.factor * median_s + stall.grace_s
    return max((clock.allowed_s or by_policy_s for clock in clocks), default=by_policy_s) - median_s


def _blame_by_clock(state: JobState, rank: int, clock: RankProgress | None, suspicion: FaultReport) -> None:
    """Hold at fault who holds up the others: since not after that was seen, and not before the process was there."""
    holder, since_s = state.world.holders[rank], suspicion.at_s
    if clock is not None:
        since_s = min(suspicion.at_s, max(holder.started_s, state.now - clock.activity_age_s))
    named = msgspec.structs.replace(
        suspicion,
        rank=rank,
        node=holder.node,
        incarnation=holder.incarnation,
        at_s=since_s,
        detail=f"rank {rank} holds up the others: {describe_clock(clock)}",
        seen_by=CONTROLLER,
    )
    _blame(state, do.Blame(named))


def _dismiss(state: JobState, reason: str) -> Recs:
    """Nothing is wrong: back to where the suspicion came."""
    state.incident = state.incident.suspect_only()
    if state.history.open is not None and not state.history.open.decisions:
        state.history.dismissed(state.now, reason)
    state.enter(state.policy.deadlines.first_step_s if state.phase is Phase.RESUMING else None)
    return None


def _link_anew(state: JobState, suspicion: FaultReport) -> Recs:
    """The communicators could not be built: try again under a fresh generation, all together, up to the limit."""
    limit = state.policy.communicator.link_up_attempts
    state.incident, again = state.incident.link_again(limit)
    if again:
        return [do.OpenGeneration()]
    return [do.RungFailed(None, f"no communicators after {limit} attempts: {suspicion.detail}")]


# --- attribution: from what was seen to the ranks at fault ----------------------------------------------------------

_WAITING_FOR_PEERS = frozenset({Activity.COLLECTIVE, Activity.COMMITTING})


def stalled_ranks(clocks: Collection[RankProgress], silent: Iterable[int] = (), limit_s: float = 0) -> tuple[int, ...]:
    """Return the ranks that hold up the others, from all step clocks read at about the same time.

    A rank that the kernel has stopped is at fault, and so is one of a node that does not answer (`silent`). Otherwise
    those that are furthest behind, if they are not waiting in a collective themselves and have been at what they do
    for longer than `limit_s` (the age of their step would hold against them that they had to wait in it), or do
    nothing at all for longer than they may. Empty: no rank can be blamed.
    """
    certain = {clock.rank for clock in clocks if clock.suspended} | set(silent)
    if certain:
        return tuple(sorted(certain))
    blamed = [clock for clock in _furthest_behind(clocks) if clock.activity not in _WAITING_FOR_PEERS | EXCUSED]
    if len(blamed) == sum(clock.activity is not Activity.FINISHED for clock in clocks):
        return ()
    return tuple(sorted(clock.rank for clock in blamed if clock.rest_s or clock.activity_age_s > limit_s))


def read_apart(clocks: Collection[RankProgress]) -> bool:
    """Say whether some clocks may have been read long before others: those of the ranks stand at different steps.

    A step is committed when all ranks are at its end. One that stands still is left behind at that end only, and is
    found there again; one that was read before the others went on is not.
    """
    working = [clock for clock in clocks if clock.activity is not Activity.FINISHED]
    return len({clock.step for clock in working}) > 1 and not any(clock.suspended for clock in working)


def excused_ranks(clocks: Iterable[RankProgress]) -> tuple[int, ...]:
    """Return the ranks that take long with good reason."""
    return tuple(sorted(clock.rank for clock in clocks if clock.activity in EXCUSED))


def nobody_waits(clocks: Collection[RankProgress]) -> bool:
    """Say whether every rank is at work for itself: all of them together are slow, and none holds up another."""
    return bool(clocks) and not any(clock.suspended or clock.activity in _WAITING_FOR_PEERS for clock in clocks)


def moved_on(clocks: Collection[RankProgress], limit_s: float) -> bool:
    """Say whether those that all others wait for are at work again, since less than `limit_s`.

    In a world that runs, the rank that is furthest behind is not at fault for that. Nor is one that is just about to
    leave what it has waited for: all others have left it a moment ago.
    """
    if any(clock.suspended for clock in clocks):
        return False
    last = _furthest_behind(clocks)
    behind = [clock for clock in last if clock.activity not in _WAITING_FOR_PEERS | EXCUSED]
    ahead = [] if behind else [clock for clock in clocks if clock not in last and clock.activity in _WAITING_FOR_PEERS]
    return all(clock.activity_age_s <= limit_s for clock in behind or ahead or clocks)


def _furthest_behind(clocks: Iterable[RankProgress]) -> list[RankProgress]:
    working = [clock for clock in clocks if clock.activity is not Activity.FINISHED]
    last = min(((clock.step, clock.collectives) for clock in working), default=None)
    return [clock for clock in working if (clock.step, clock.collectives) == last]


# --- the topic --------------------------------------------------------------------------------------------------------


def _answer_limit_s(state: JobState) -> float:
    return _reading_limit_s(state) if state.clocks.awaited else state.policy.deadlines.suspect_s


def _owes(state: JobState) -> Iterator[Owed]:
    for name in sorted(state.clocks.awaited):
        yield node_address(name), m.ProbeProgress(state.clocks.probe)


def _contradictions(state: JobState) -> Iterator[str]:
    untreated = state.incident.held(Verdict.CULPRIT, Verdict.MENDING)
    if untreated and state.phase not in {Phase.WAITING, *OVER}:
        yield f"the job is {state.phase}, and nothing was decided about ranks {sorted(untreated)}"


BLAME = Topic(
    name="blame",
    takes=(
        Row(ALIVE, m.ProcessExited, _on_process_exited),
        Row((Phase.SUSPECTING, Phase.RUNNING, Phase.PAUSING), m.ProgressReported, _on_progress_reported),
    ),
    answers={do.TakeFault: _take_fault, do.Blame: _blame, do.Suspect: _suspect, do.AskNodes: _ask_nodes},
    rules=(Rule(frozenset({Phase.SUSPECTING}), lambda state: state.clocks.complete, _resolve),),
    limits={Phase.SUSPECTING: PhaseLimit(_resolve, _answer_limit_s)},
    owes=_owes,
    contradictions=_contradictions,
)
