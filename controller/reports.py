"""What happens when something is reported to be wrong, when a node comes or goes, and when time runs out."""

import msgspec

from ..protocol.messages import (
    FaultReported,
    ProbeProgress,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
)
from ..protocol.types import CONTROLLER, FaultKind, FaultReport, node_address
from .deciding import blame, current_rung, decide, rung_failed, with_rank
from .ending import end, ready_to_save
from .faults import SUSPICIONS, describe_exit, stalled_ranks
from .openings import open_generation
from .state import OVER, JobState, Phase
from .world import GONE, RankState


def on_fault_reported(state: JobState, event: FaultReported, now: float) -> None:
    """Somebody saw something."""
    take_fault(state, event.report, now)


def take_fault(state: JobState, report: FaultReport, now: float) -> None:
    """The one door for faults: drop what is stale, remember the rest, decide or wait for the culprit."""
    if state.phase in OVER or state.phase is Phase.WAITING:
        state.ignore(f"fault while {state.phase}")
        return
    if report.rank is not None:
        holder = state.world.holders[report.rank] if report.rank < state.world.size else None
        if holder is None or (report.incarnation and report.incarnation != holder.incarnation):
            state.ignore("fault of an earlier process")
            return
    if report.kind in SUSPICIONS and state.phase in {Phase.QUIESCING, Phase.STARTING}:
        state.ignore("suspicion while everybody is being stopped")
        return
    if report.rank in state.guilty:
        state.ignore("fault of a rank that is being replaced")
        return
    state.history.report(report, state.world.pids(), now, state.committed)
    if report.kind in SUSPICIONS:
        suspect(state, report, now)
        return
    blame(state, report)
    decide(state, now)


def suspect(state: JobState, report: FaultReport, now: float) -> None:
    """Something is wrong and nobody is at fault yet: give the culprit's own report a moment to arrive."""
    state.suspicions.append(report)
    if state.phase is not Phase.SUSPECTING:
        state.suspected_in = state.phase
        state.enter(Phase.SUSPECTING, now, state.policy.deadlines.suspect_s)
    if report.kind is FaultKind.STALL and not state.awaiting_progress:
        probe_nodes(state, now)


def probe_nodes(state: JobState, now: float) -> None:
    """Ask every node for its step clocks, to find out who holds up the others."""
    state.probes += 1
    state.world.progress.clear()
    state.awaiting_progress = set(state.world.group_nodes())
    for name in sorted(state.awaiting_progress):
        state.send(node_address(name), ProbeProgress(state.probes))
    state.due_s = now + max(state.policy.deadlines.suspect_s, PROBE_S)


PROBE_S = 2.0  # a node that does not read its clocks in this time counts as silent


def on_progress_reported(state: JobState, event: ProgressReported, now: float) -> None:
    """A node has read its step clocks."""
    if event.probe != state.probes or event.node not in state.awaiting_progress:
        state.ignore("progress of an earlier probe")
        return
    state.awaiting_progress.discard(event.node)
    for clock in event.ranks:
        state.world.progress[clock.rank] = clock
    if not state.awaiting_progress:
        resolve_suspicion(state, now)


def resolve_suspicion(state: JobState, now: float) -> None:
    """Nobody has been found at fault by itself: read the clocks; failing that, link anew or ask the ladder."""
    silent = [h.rank for name in state.awaiting_progress for h in state.world.on(name)]
    probed = bool(state.world.progress) or bool(silent)
    state.awaiting_progress.clear()
    suspicion = state.suspicions[0]
    for rank in stalled_ranks(state.world.progress.values(), silent) if probed else ():
        holder = state.world.holders[rank]
        clock = state.world.progress.get(rank)
        what = (
            "its node does not answer"
            if clock is None
            else (
                f"in {clock.activity} for {clock.activity_age_s:.1f} s"
                + (", stopped by a signal" if clock.suspended else "")
            )
        )
        named = with_rank(suspicion, rank, holder.node, holder.incarnation)
        named = msgspec.structs.replace(named, detail=f"rank {rank} holds up the others: {what}", seen_by=CONTROLLER)
        state.history.report(named, state.world.pids(), now, state.committed)
        blame(state, named)
    state.world.progress.clear()
    if not state.guilty and state.suspected_in is Phase.REJOINING and current_rung(state) is not None:
        _link_anew(state, suspicion, now)
        return
    decide(state, now)


def _link_anew(state: JobState, suspicion: FaultReport, now: float) -> None:
    """The communicators could not be built: try again under a fresh generation, all together, up to the limit."""
    state.relinks += 1
    if state.relinks < state.policy.communicator.link_up_attempts:
        open_generation(state, (), now)
        return
    state.relinks = 0
    rung_failed(
        state,
        None,
        f"no communicators after {state.policy.communicator.link_up_attempts} attempts: {suspicion.detail}",
        now,
    )


def on_process_started(state: JobState, event: ProcessStarted, now: float) -> None:
    """An agent has started a process."""
    holder = state.world.holders[event.process.rank]
    if event.process.incarnation != holder.incarnation:
        state.ignore("start of an earlier process")
        return
    holder.pid = event.process.pid


def on_process_exited(state: JobState, event: ProcessExited, now: float) -> None:
    """A training process has ended: well, or as a fault."""
    process = event.process
    holder = state.world.holders[process.rank]
    if process.incarnation != holder.incarnation or holder.state in GONE:
        state.ignore("exit of an earlier process")
        return
    if event.last is not None and event.last.incarnation == process.incarnation:
        state.committed = max(state.committed, event.last.step)
    parked_well = holder.state is RankState.RELEASED or not holder.resilient
    if event.status == 0 and parked_well:
        _exited_well(state, holder.rank, now)
        return
    if holder.state is RankState.RELEASED:
        reason = f"rank {holder.rank} failed after training had finished: {describe_exit(event.status)}"
        end(state, event.status if event.status > 0 else 1, reason, now)
        return
    report = FaultReport(
        kind=FaultKind.EXIT,
        at_s=event.at_s,
        seen_by=node_address(event.node),
        detail=describe_exit(event.status),
        rank=holder.rank,
        node=holder.node,
        generation=state.generation,
        incarnation=process.incarnation,
    )
    if state.phase is Phase.SAVING:
        _lost_while_saving(state, report, now)
        return
    take_fault(state, report, now)
    if holder.incarnation == process.incarnation:
        holder.lose()


def _lost_while_saving(state: JobState, report: FaultReport, now: float) -> None:
    """A survivor died while the emergency checkpoint was under way: the others may still hold everything."""
    rank = report.rank
    assert rank is not None
    state.world.holders[rank].lose()
    if rank in state.awaiting_quiesced:
        state.awaiting_quiesced.discard(rank)
        ready_to_save(state, now)
    elif rank in state.saving:
        end(
            state,
            state.stop_code,
            f"{state.stop_reason}; rank {rank} was lost while it saved: {report.detail}",
            now,
        )


def _exited_well(state: JobState, rank: int, now: float) -> None:
    holder = state.world.holders[rank]
    holder.state, holder.pid = RankState.EXITED, 0
    state.unfinished.discard(rank)
    state.awaiting_joined.discard(rank)
    if not state.unfinished and len(state.world.in_state(RankState.EXITED)) == state.world.size:
        end(state, 0, "all ranks have finished", now)
