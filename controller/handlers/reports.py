"""What happens when something is reported to be wrong: faults, and processes that start or end."""

from ...protocol.messages import (
    FaultReported,
    ProcessExited,
    ProcessStarted,
    StopProcess,
)
from ...protocol.types import FaultKind, FaultReport, node_address
from ..changes.drain import newcomer_failed, newcomer_started
from ..changes.shutdown import end, lost_while_saving
from ..faults import SUSPICIONS, describe_exit
from ..recovery import memory_faults
from ..recovery.decision import blame_and_decide
from ..recovery.hardware_faults import asks_to_leave, put_off, sort_out, stands
from ..recovery.incident import Verdict
from ..recovery.state import OVER, JobState, Phase
from ..recovery.suspicion import suspect
from ..recovery.world import DONE, GONE, RankEvent, RankState


def on_fault_reported(state: JobState, event: FaultReported, now: float) -> None:
    """Take in a fault report. What concerns no rank's process as it is now goes its own way."""
    report = sort_out(state, event.report, now)
    if report is None or newcomer_failed(state, report.rank, report.incarnation, report.detail, now):
        return
    if report.kind is FaultKind.STALL and state.phase is Phase.PAUSING:
        state.ignore("stall on the way to a stop, which has a deadline of its own")
    elif report.kind is FaultKind.UNRESPONSIVE:
        _take_suspended(state, report, now)
    else:
        take_fault(state, report, now)


def _take_suspended(state: JobState, report: FaultReport, now: float) -> None:
    """An agent sees that a process is stopped: no wait for it is worth its time, in any phase in which it is needed.

    A script that is not resilient is left as it is, as by torchrun: a person may be looking at it with a debugger.
    """
    holder = None if report.rank is None else state.world.holder(report.rank)
    if not state.ever_resilient:
        state.ignore("process that is stopped, of a script that is not resilient")
    elif holder is not None and holder.state in DONE and report.incarnation == holder.incarnation:
        state.ignore("process that is stopped, of a rank that has finished")  # its exit has a deadline
    elif state.phase is Phase.SAVING and report.rank is not None and _stale(state, report) is None:
        assert holder is not None
        # The others save without it as soon as its end is known.
        state.send(node_address(holder.node), StopProcess(holder.rank, holder.incarnation, grace_s=0.0))
    else:
        take_fault(state, report, now)


def take_fault(state: JobState, report: FaultReport, now: float) -> None:
    """The one door for faults: drop what is stale, remember the rest, decide or wait for the culprit."""
    if state.phase in OVER or state.phase is Phase.WAITING:
        put_off(state, report)
        return
    stale = _stale(state, report) or _past_suspicion(state, report)
    if stale is not None:
        state.ignore(stale)
        return
    if report.kind is FaultKind.LINK_UP:
        state.meeting.link_up_failed(state.world)
    if state.incident.verdict(report.rank) is Verdict.CULPRIT:
        state.ignore("fault of a rank that is being replaced")
        return
    if report.kind in SUSPICIONS or memory_faults.is_awaited(state, report):
        state.remember(report, now)
        suspect(state, report, now)
        return
    blame_and_decide(state, [report], now)


def _past_suspicion(state: JobState, report: FaultReport) -> str | None:
    """Say why a suspicion is over already, perhaps as it was long on its way; None when it is to be looked into."""
    if report.kind not in SUSPICIONS:
        return None
    if state.phase in {Phase.QUIESCING, Phase.STARTING}:
        return "suspicion while everybody is being stopped"
    if 0 < report.generation < state.generation:
        return "suspicion of an earlier generation"
    if report.kind is not FaultKind.STALL or state.phase is Phase.SUSPECTING:
        return None
    if state.phase is Phase.FINISHING:
        return "stall of a step that is over"
    return "stall from before the clocks were read last" if report.at_s < state.clocks.asked_s else None


def take_up(state: JobState, now: float) -> None:
    """There is a world again: faults that came while there was none, and that stand where it is now, are its faults."""
    reports, state.book.put_off = state.book.put_off, []
    for report in reports:
        still = stands(state, report)
        if still is not None:
            take_fault(state, still, now)


def _stale(state: JobState, report: FaultReport) -> str | None:
    """Say why a report is about what is no longer there, or is known; None when it is news."""
    if report.rank is None:
        return None
    holder = state.world.holders[report.rank] if report.rank < state.world.size else None
    earlier = holder is None or (report.incarnation and report.incarnation != holder.incarnation)
    if earlier and not asks_to_leave(report):  # what is wrong with a device is so for each process on it
        return "fault of an earlier process"
    if holder is None or (report.node and holder.node and report.node != holder.node):
        return "fault on a node that the rank has left"
    if memory_faults.is_known(state, report):
        return "fault of memory that its process has reported, or that is older than it"
    return None


def on_process_started(state: JobState, event: ProcessStarted, now: float) -> None:
    """An agent has started a process."""
    if newcomer_started(state, event.process):
        return
    process = event.process
    holder = state.world.holder(process.rank)
    if holder is None or process.incarnation != holder.incarnation or holder.state in GONE:
        state.ignore("start of an earlier process")  # the order to end it may have come before the one to start it
        state.send(node_address(event.node), StopProcess(process.rank, process.incarnation, grace_s=0.0))
        return
    holder.heard(event.process.pid, now)


def on_process_exited(state: JobState, event: ProcessExited, now: float) -> None:
    """A training process has ended: well, or as a fault."""
    process, how = event.process, describe_exit(event.status, out_of_memory=event.out_of_memory)
    if newcomer_failed(state, process.rank, process.incarnation, how, now):
        return
    holder = state.world.holder(process.rank)
    if holder is None or process.incarnation != holder.incarnation or holder.state in GONE:
        state.ignore("exit of an earlier process")
        return
    if event.last is not None and event.last.incarnation == process.incarnation:
        state.progress.heard(event.last.step)
    parked_well = holder.state is RankState.RELEASED or not holder.resilient
    if event.status == 0 and parked_well:
        state.world.take(holder, RankEvent.EXITED)
        holder.pid = 0
        return
    if holder.state is RankState.RELEASED:
        reason = f"rank {holder.rank} failed after training had finished: {how}"
        end(state, event.status if event.status > 0 else 1, reason, now)
        return
    report = FaultReport(
        kind=FaultKind.OUT_OF_MEMORY if event.out_of_memory else FaultKind.EXIT,
        at_s=event.at_s,
        seen_by=node_address(event.node),
        detail=how,
        rank=holder.rank,
        node=holder.node,
        generation=state.generation,
        incarnation=process.incarnation,
        output=event.output,
    )
    if state.phase is Phase.SAVING:
        lost_while_saving(state, (holder.rank,), report.detail, now)
        return
    take_fault(state, report, now)
    if holder.incarnation == process.incarnation:
        state.world.lose(holder)
