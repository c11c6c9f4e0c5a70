"""Struck memory is seen twice: by the cluster's detector, and a moment later by the process that touches it.

The process knows more: whether it lives on and can mend itself. So the detector's report waits for its word, as a
suspicion does, and a report that comes after that word is the same fault once more.
"""

from ...policies.fault_codes import TREATMENTS, Treatment
from ...protocol.types import FaultKind, FaultReport, rank_address
from .incident import Verdict
from .state import JobState, Phase
from .world import AT_WORK

MOST_S = 10.0  # a process notices within the step that it is in, and a long one is not waited for
SAME_FAULT_S = 30.0  # a detector that speaks later than this after the process means something new

_STRUCK = frozenset({FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT})
_TRAINING = frozenset({Phase.RUNNING, Phase.RESUMING, Phase.SUSPECTING})


def note(state: JobState, rank: int, report: FaultReport) -> None:
    """Remember that a process has said itself that its memory was struck; what waited for that is answered."""
    if report.kind in _STRUCK and not _from_outside(report):
        state.world.holders[rank].memory_fault_s = state.turn.now
    suspicions = state.incident.suspicions
    if any(each.rank == rank for each in suspicions):
        still = (each for each in suspicions if not (each.rank == rank and _from_outside(each)))
        state.incident = state.incident.suspect_only(still)


def is_known(state: JobState, report: FaultReport) -> bool:
    """Say whether a detector reports what the process has told already, or what struck the one before it.

    What a detector says soon after a process was replaced is about the one before it: a process that is hurt all the
    same says so itself.
    """
    if report.rank is None or not _from_outside(report):
        return False
    holder = state.world.holders[report.rank]
    if report.at_s < holder.started_s + (SAME_FAULT_S if holder.incarnation > 1 else 0.0):
        return True
    if state.incident.verdict(report.rank) in {Verdict.MENDING, Verdict.MENDED}:
        return True
    said_s = holder.memory_fault_s
    return said_s is not None and state.turn.now - said_s <= SAME_FAULT_S


def is_awaited(state: JobState, report: FaultReport) -> bool:
    """Say whether the process that a detector speaks of trains, and so will come upon the fault by itself."""
    if report.rank is None or not _from_outside(report) or state.phase not in _TRAINING:
        return False
    holder = state.world.holders[report.rank]
    return holder.resilient and holder.state in AT_WORK


def patience_s(state: JobState) -> float:
    """Return how long the process's own word is waited for."""
    return state.policy.deadlines.suspect_s + min(state.progress.median_step_s, MOST_S)


def unheard(state: JobState) -> list[FaultReport]:
    """Return the detectors' reports that no process has spoken to: they count as they are."""
    return [each for each in state.incident.suspicions if _from_outside(each)]


def _from_outside(report: FaultReport) -> bool:
    """Whether a detector says that memory was struck, and no worse than that a new process there would do."""
    if report.rank is None or report.mendable or report.seen_by == rank_address(report.rank):
        return False  # no detector can know what a process can mend
    return report.kind in _STRUCK and TREATMENTS[report.level] is Treatment.RESTART
