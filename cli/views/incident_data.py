"""Incidents and their job as plain data: one shape for `midstep report --json`, the demo and the benchmarks."""

from typing import Any

import msgspec

from ...protocol.incidents import Incident, JobStatus, Outcome
from ...protocol.types import Decision, FaultReport
from .causes import cause_line
from .timeline import phase_seconds, slowest_rank_seconds


def incident_json(incident: Incident, until_s: float | None = None) -> dict[str, Any]:
    """Return an incident as data that `json.dumps` takes.

    `phases` are the controller's phases in seconds, over all attempts; of a resumed incident they add up to
    `recovery_s`. `rank_phases` are single ranks' phases, `slowest_rank_phases` the longest of each name.
    `steps_lost`, `healthy_pids_kept`, `recovery_s` and `excess_s` are null unless the job went on: there is nothing to
    count them to. `steps_lost` is null, too, where all that knew how far training was are lost. `until_s`: wall-clock
    seconds up to which the phase under way of an open incident is counted.
    """
    resumed = incident.outcome is Outcome.RESUMED
    return {
        "number": incident.number,
        "outcome": str(incident.outcome),
        "rung": None if incident.rung is None else str(incident.rung),
        "cause": cause_line(incident),
        "steps_lost": incident.steps_lost if resumed and incident.committed_is_known else None,
        "healthy_pids_kept": incident.healthy_pids_kept if resumed else None,
        "recovery_s": incident.recovery_s,
        "excess_s": incident.excess_s,
        "phases": phase_seconds(incident, until_s),
        "reasons": reasons(incident),
        "began_s": incident.began_s,
        "median_step_s": incident.median_step_s,
        "generations": list(incident.generations),
        "restore": None if incident.restore is None else str(incident.restore),
        "bytes_moved": incident.bytes_moved,
        "bytes_over_devices": incident.bytes_over_devices,
        "committed_before": incident.committed_before,
        "resumed_step": incident.resumed_step,
        "replaced": list(incident.replaced),
        "pids_before": {str(rank): pid for rank, pid in sorted(incident.pids_before.items())},
        "pids_after": {str(rank): pid for rank, pid in sorted(incident.pids_after.items())},
        "slowest_rank_phases": slowest_rank_seconds(incident),
        "rank_phases": [
            {
                "generation": phase.generation,
                "rank": phase.rank,
                "name": phase.name,
                "duration_s": phase.duration_s,
            }
            for phase in incident.rank_phases
        ],
        "decisions": [_decision_json(decision) for decision in incident.decisions],
        "reports": [_report_json(report) for report in incident.reports],
        "ended_reason": incident.ended_reason,
    }


def reasons(incident: Incident) -> list[str]:
    """Return every reason that was recorded, in words: for each decision the rungs not taken and the one taken, then
    how the state was repaired, then why it ended as it did."""
    said: list[str] = []
    for decision in incident.decisions:
        said.extend(decision.in_words())
    said.extend(incident.repair_reasons)
    if incident.ended_reason:
        said.append(incident.ended_reason)
    return said


def report_json(status: JobStatus, incidents: tuple[Incident, ...]) -> dict[str, Any]:
    """Return what `midstep report --json` prints: the job, the chosen incidents, the budgets."""
    return {
        "job": status.job,
        "at_s": status.at_s,
        "phase": status.phase,
        "committed": status.committed,
        "exit_code": status.exit_code,
        "reason": status.reason,
        "incidents": [incident_json(incident, status.at_s) for incident in incidents],
        "budgets": budgets_json(status),
        "refused": dict(status.refused),
        "faults": faults_json(status),
        "holds": [msgspec.to_builtins(hold) for hold in status.holds],
    }


def budgets_json(status: JobStatus) -> list[dict[str, Any]]:
    """Return the budgets as data: name, used, limit."""
    return [{"name": budget.name, "used": budget.used, "limit": budget.limit} for budget in status.budgets]


def _decision_json(decision: Decision) -> dict[str, Any]:
    return {
        "rung": str(decision.rung),
        "reason": decision.reason,
        "roles": list(decision.roles),
        "skipped": [{"rung": str(skipped.rung), "reason": skipped.reason} for skipped in decision.skipped],
    }


def _report_json(report: FaultReport) -> dict[str, Any]:
    return {
        "kind": str(report.kind),
        "at_s": report.at_s,
        "seen_by": report.seen_by,
        "detail": report.detail,
        "rank": report.rank,
        "node": report.node,
        "generation": report.generation,
        "incarnation": report.incarnation,
        "level": str(report.level),
        "code": report.code,
        "device": report.device,
        "fault_id": report.fault_id,
        "assertion": str(report.assertion),
        "meaning": report.meaning,
        "output": report.output,
    }


def faults_json(status: JobStatus) -> list[dict[str, Any]]:
    """Return what stands as data: each report with since when and how often."""
    return [{**_report_json(fault.report), "since_s": fault.since_s, "times": fault.times} for fault in status.faults]
