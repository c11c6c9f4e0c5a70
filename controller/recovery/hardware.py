"""TOPIC: what becomes of faults of devices, nodes and networks before a rank or a node is blamed.

They enter the fault book. One that stands where no rank can be hurt keeps its node from being chosen; one that asks for
nothing is only noted; one that has recovered may free a node, or let a process start that waited for its device. What
is left is a fault of a rank or of a node in use, and is taken as any other (`blame.py`). Faults that came while there
was no world are taken up as soon as there is one again.

*Wrong ranks.* The ranks vote among themselves and say who is to blame (`processor/votes.py`). One that was wrong once
may have met a stray particle, and mends itself as any other that can. So each time is a strike against the rank on its
node. With the policy's number of strikes within its window, what the rank computes on is taken for broken: it is moved,
and the node is left, where a spare is there to move to.

*Slow nodes.* The controller finds them from each rank's own time and links (`controller/slow_ranks.py`). Such a
node is shown, or left as one that a detector calls not well. Each time is one of few within a window, whatever becomes
of it: where it is not the node that is slow, the ranks would wander from one to the next. A slow data loader is slow on
another node, too: it is only shown.
"""

import math

import msgspec

from ...policies.budgets import NodeFailure, WrongVote
from ...policies.fault_codes import TREATMENTS, Treatment, asks_to_leave
from ...policies.schema import SlowAction, SubHealthAction
from ...protocol.faults import EACH_TIME
from ...protocol.messages import FaultReported
from ...protocol.rules import DO_NOT_REQUEUE
from ...protocol.types import CONTROLLER, Assertion, FaultKind, FaultLevel, FaultReport, IntegrityAction
from ...protocol.wording import faults_text, one_line
from . import topic as do
from .orders import settle
from .state import OVER, JobState, Phase
from .topic import ALIVE, Deadline, Recs, Row, Topic
from .world import NodeState

MOST_STRIKES = 1000  # of a job that are remembered: the oldest goes


def _on_fault_reported(state: JobState, event: FaultReported) -> Recs:
    report = event.report
    if report.kind is FaultKind.RULE:  # nothing is at fault
        return [do.RuleBroken(report)]
    if report.kind is FaultKind.REFUSED:
        return _refused(state, report)
    judged: FaultReport | None = report
    if report.kind in {FaultKind.ODD_COPY, FaultKind.WRONG_GRADIENT}:
        judged = _wrong(state, report)
    elif report.kind in {FaultKind.SLOW, FaultKind.SLOW_INPUT, FaultKind.SLOW_LINK} and report.seen_by == CONTROLLER:
        judged = _slow(state, report)
    return None if judged is None else _sort_out(state, do.SortOut(judged))


def _refused(state: JobState, report: FaultReport) -> Recs:
    """End the job: another process would ask for the same thing, and be refused as well."""
    if state.phase in OVER:
        state.ignore("refusal while the job is saved")
        return None
    state.remember(report)
    return [do.StopNow(f"{faults_text([report])}: {one_line(report.detail)}", DO_NOT_REQUEUE)]


def _sort_out(state: JobState, rec: do.SortOut) -> Recs:
    """Enter a fault of hardware into the book; recommend what has to be done now, with its rank and node.

    A fault of software is taken as it is, if it can hurt a rank.
    """
    report = rec.report
    if report.node is not None:
        report = msgspec.structs.replace(report, node=state.world.node_called(report.node))
    if report.assertion is Assertion.RECOVER:
        return _recovered(state, _located(state, report))
    if report.level is FaultLevel.SOFTWARE:
        if report.rank is None and report.node is not None and not state.world.on(report.node):
            state.ignore("fault of a node that holds no rank")
            return None
        return _taken(state, report)
    report, news = state.book.enter(_located(state, report), state.now)
    if not news:
        state.ignore("fault that stands already")
        return None
    settle(state, report.node)
    if TREATMENTS[report.level] is Treatment.WATCH and state.policy.sub_health is not SubHealthAction.LEAVE_NOW:
        return [do.NotWell(report)] if state.book.concerns_ranks(report) else None
    hurts = _hurts(state, report)
    if not hurts and report.assertion is Assertion.ONCE:
        state.ignore(f"{report.level} that hurts no rank")
    return _taken(state, report) if hurts else None


def _taken(state: JobState, report: FaultReport) -> Recs:
    """Take a fault for that of the process that it is about: one that was started early holds no rank yet."""
    if report.rank is not None and state.planned.newcomer(report.rank, report.incarnation) is not None:
        return [do.NewcomerFailed(report.rank, report.detail)]
    if report.kind is FaultKind.STALL and state.phase is Phase.PAUSING:
        state.ignore("stall on the way to a stop, which has a deadline of its own")
        return None
    return [do.TakeFault(report)]


def _located(state: JobState, report: FaultReport) -> FaultReport:
    """Fill in what follows: the node and device of a rank, or the rank on a device of a node in use."""
    world = state.world
    if report.rank is not None:
        holder = world.holder(report.rank)
        where = report.node or (holder.node if holder is not None else None)
        device = state.book.device_of(where, report.rank) if report.device is None else report.device
        if holder is not None and (where == holder.node or not asks_to_leave(report)):
            return msgspec.structs.replace(report, node=where, device=device)
        if holder is None and not (where and asks_to_leave(report)):
            return report
        # Another rank is there by now, and what is wrong with the device is so for each.
        report = msgspec.structs.replace(report, rank=None, incarnation=0, device=device)
    if report.node is None or report.device is None:
        return report
    here = world.on(report.node)
    held = [holder for holder in here if state.book.device_of(report.node, holder.rank) == report.device]
    return msgspec.structs.replace(report, rank=held[0].rank) if held else report


def _hurts(state: JobState, report: FaultReport) -> bool:
    """Say whether the fault is for the ladder: it asks for something, and a rank is where it is."""
    treatment = TREATMENTS[report.level]
    if treatment in {Treatment.NOTE, Treatment.CLOSE}:
        return False
    node = state.world.nodes.get(report.node or "")
    if node is None or node.state is not NodeState.ACTIVE:
        return False
    return report.rank is not None or (report.device is None and bool(state.world.on(node.name)))


def _recovered(state: JobState, report: FaultReport) -> Recs:
    cleared = state.book.clear(report)
    if cleared is None:
        state.ignore("recovery of a fault that is not known")
        return None
    node = cleared.report.node
    settle(state, node)
    recs = [] if node is None else [do.WellAgain(node)]
    return [*recs, *([do.StartIfPossible()] if state.phase is Phase.WAITING else []), do.ReleaseHeld()]


# --- ranks that were wrong, and slow nodes ----------------------------------------------------------------------------


def _wrong(state: JobState, report: FaultReport) -> FaultReport | None:
    """Count that a rank was wrong; return what is to be sorted out: that it is moved if that was once too often."""
    policy = state.policy.integrity
    holder = None if report.rank is None else state.world.holder(report.rank)
    if report.assertion is Assertion.RECOVER:
        return report
    if holder is None or report.incarnation != holder.incarnation:
        state.ignore("wrong vote of an earlier process")
        return None
    strikes = _times_wrong(state, holder.rank, holder.node)
    if report.code == EACH_TIME:  # it has had its second chance in the step itself
        strikes = max(strikes, policy.strikes)
    text = f"{report.detail}; strike {strikes} of {policy.strikes} on node {holder.node}"
    if policy.then is IntegrityAction.REPORT or strikes < policy.strikes:
        return msgspec.structs.replace(report, detail=text)
    if not state.world.spares():
        return msgspec.structs.replace(report, detail=f"{text}, and no spare node is there")
    accounts = state.accounts
    accounts.strikes = [each for each in accounts.strikes if each.node != holder.node]
    # What the rank computes on is broken: no process may be there, and its own cannot mend it.
    return msgspec.structs.replace(
        report,
        detail=f"{text}: the node is left",
        level=FaultLevel.SEPARATE_NPU,
        mendable=False,
        code=None,
        fault_id=f"strikes of rank {report.rank}",
        assertion=Assertion.OCCUR,
    )


def _times_wrong(state: JobState, rank: int, node: str) -> int:
    """Enter one more, and return how many the rank has on its node within the window."""
    since_s = state.now - state.policy.integrity.window_s
    fresh = [each for each in state.accounts.strikes if each.at_s > since_s]
    strikes = [*fresh, WrongVote(rank, node, state.now)][-MOST_STRIKES:]
    state.accounts.strikes = strikes
    return sum((each.rank, each.node) == (rank, node) for each in strikes)


def _slow(state: JobState, report: FaultReport) -> FaultReport | None:
    """Say what is done about a node that is slower than others, or is so no more, by a level."""
    slow, level = state.policy.slow, FaultLevel.NOT_HANDLE
    if report.assertion is Assertion.RECOVER:
        return msgspec.structs.replace(report, level=level)
    if any(report.fault_id == fault.report.fault_id for fault in state.book.standing()):
        state.ignore("slow node that is known")
        return None
    detail, node = report.detail, report.node or ""
    if report.kind is not FaultKind.SLOW_INPUT and slow.then in {SlowAction.DRAIN, SlowAction.SHRINK}:
        past = [each for each in state.accounts.slow if state.now - each.at_s < slow.window_s]
        if len(past) < slow.nodes:
            level = FaultLevel.SUB_HEALTH
            state.accounts.slow = [*past, NodeFailure(node, state.now)]
        else:
            detail += f"; it stays, as slow.nodes within {slow.window_s:g} s is {slow.nodes}"
    state.say(f"node {node}: {detail}")
    return msgspec.structs.replace(report, level=level, detail=detail)


# --- faults that came while there was no world ------------------------------------------------------------------------


def _take_up_all(state: JobState) -> Recs:
    return list(map(do.TakeUp, state.book.take_put_off()))


def _take_up(state: JobState, rec: do.TakeUp) -> Recs:
    """There is a world again: a fault that still stands, and hurts the rank that is there now, is that one's fault."""
    report = _located(state, msgspec.structs.replace(rec.report, rank=None, incarnation=0))
    standing = report.node and state.book.on(report.node, frozenset({Treatment.LEAVE}), report.device)
    return [do.TakeFault(report)] if standing and _hurts(state, report) else None


HARDWARE = Topic(
    name="hardware",
    takes=(Row(ALIVE, FaultReported, _on_fault_reported),),
    answers={do.SortOut: _sort_out, do.TakeUp: _take_up},
    # What waits for no answer is due at once, even while no answer can arrive.
    deadlines=(Deadline("put off", _take_up_all, at=lambda state: -math.inf if state.has_put_off else None),),
)
