"""Incidents and their job as plain data: for `midstep report --json`, the demo and the benchmarks, and as a trace.

A trace is for ui.perfetto.dev or chrome://tracing, in the Trace Event Format's JSON object form. The job is one
process; the controller and each rank are its threads. Times are microseconds since the first incident began, because
whole Unix times in microseconds are at the edge of what a viewer's numbers hold.
"""

from typing import Any

import msgspec

from ...protocol.incidents import Incident, JobStatus, Outcome
from ...protocol.slow_records import SlowTold
from ...protocol.time_spent import TimeCategory, TimeSpent
from ...protocol.types import Decision, FaultReport
from .causes import cause_line
from .timeline import IncidentTimeline, Span, finite, lay_out, phase_seconds, slowest_rank_seconds
from .wording import date_text, telling_line

MICROSECONDS_PER_S = 1e6
PROCESS = 1
CONTROLLER_THREAD = 0
FIRST_RANK_THREAD = 1
DECISION_PHASE = "quiescing"
Event = dict[str, Any]


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


def report_json(
    status: JobStatus,
    incidents: tuple[Incident, ...],
    forecast: TimeSpent | None = None,
    slow: SlowTold | None = None,
) -> dict[str, Any]:
    """Return what `midstep report --json` prints: the job, the chosen incidents, the budgets, where the time went.

    `slow`: the nodes that were named slow; None: that is not known here.
    """
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
        "slow": None if slow is None else [msgspec.to_builtins(record, str_keys=True) for record in slow.records],
        "slow_left_out": None if slow is None else slow.left_out,
        "holds": [msgspec.to_builtins(hold) for hold in status.holds],
        "rules": {name: msgspec.to_builtins(tally) for name, tally in status.rules.tallies.items()},
        "steps_left_out": status.rules.steps_left_out,
        "controls": [msgspec.to_builtins(record) for record in status.controls.records],
        "time": None if status.time is None else time_json(status.time),
        "time_lately": [time_json(spent) for spent in status.time_lately],
        "forecast": None if forecast is None else time_json(forecast),
    }


def time_json(spent: TimeSpent) -> dict[str, Any]:
    """Return where the time went as data, with every category."""
    return {
        "began_s": spent.began_s,
        "ended_s": spent.ended_s,
        "wall_s": spent.wall_s,
        "goodput": spent.goodput,
        "seconds": {str(each): spent.seconds.get(each, 0.0) for each in TimeCategory},
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


def trace_json(status: JobStatus, incidents: tuple[Incident, ...]) -> dict[str, Any]:
    """Return the trace of the chosen incidents: a complete event per phase, an instant event per fault and decision."""
    origin_s = min((incident.began_s for incident in incidents), default=status.at_s)
    timelines = [(incident, lay_out(incident, status.at_s)) for incident in incidents]
    ranks = {rank.rank for rank in status.ranks}
    events: list[Event] = []
    for incident, timeline in timelines:
        offset_s = incident.began_s - origin_s
        ranks.update(timeline.lanes)
        ranks.update(mark.rank for mark in timeline.marks if mark.rank is not None)
        events.extend(_incident_events(incident, timeline, offset_s, status.at_s))
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": [*_names(status.job, sorted(ranks)), *events],
        "displayTimeUnit": "ms",
        "otherData": {"job": status.job, "origin_s": origin_s, "origin": date_text(origin_s)},
    }


def _names(job: str, ranks: list[int]) -> list[Event]:
    named = [_name("process_name", CONTROLLER_THREAD, {"name": f"job {job}"})]
    threads = [("controller", CONTROLLER_THREAD)]
    threads.extend((f"rank {rank}", rank + FIRST_RANK_THREAD) for rank in ranks)
    for name, thread in threads:
        named.append(_name("thread_name", thread, {"name": name}))
        named.append(_name("thread_sort_index", thread, {"sort_index": thread}))
    return named


def _name(what: str, thread: int, arguments: dict[str, Any]) -> Event:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": thread, "args": arguments}


def _incident_events(incident: Incident, timeline: IncidentTimeline, offset_s: float, until_s: float) -> list[Event]:
    data = incident_json(incident, until_s)
    whole = Span(f"incident {incident.number}", 0, 0.0, timeline.length_s)
    kept = ("number", "outcome", "rung", "cause", "steps_lost", "recovery_s", "excess_s", "reasons")
    events = [_complete(whole, CONTROLLER_THREAD, offset_s, "incident", {key: data[key] for key in kept})]
    for span in timeline.phases:
        about: dict[str, Any] = {"incident": incident.number, "generation": span.generation}
        events.append(_complete(span, CONTROLLER_THREAD, offset_s, "phase", about))
    for rank, lane in timeline.lanes.items():
        for span in lane:
            about = {"incident": incident.number, "generation": span.generation, "rank": rank}
            events.append(_complete(span, rank + FIRST_RANK_THREAD, offset_s, "rank phase", about))
    for mark in timeline.marks:
        thread = CONTROLLER_THREAD if mark.rank is None else mark.rank + FIRST_RANK_THREAD
        detail = telling_line(mark.detail)
        about = {
            "incident": incident.number,
            "detail": detail,
            "node": mark.node,
            "seen_by": mark.seen_by,
            "echo": mark.echo,
        }
        events.append(_instant(f"fault: {mark.kind}", thread, offset_s + mark.at_s, "fault", about))
    events.extend(_decision_events(incident, timeline, offset_s))
    return events


def _decision_events(incident: Incident, timeline: IncidentTimeline, offset_s: float) -> list[Event]:
    """Put each decision where its attempt began to quiesce; one that opened no attempt at the end."""
    began = [span.began_s for span in timeline.phases if span.name == DECISION_PHASE]
    events = []
    for index, decision in enumerate(incident.decisions):
        at_s = offset_s + (began[index] if index < len(began) else timeline.length_s)
        about = {
            "incident": incident.number,
            "reason": decision.reason,
            "skipped": [f"{skipped.rung}: {skipped.reason}" for skipped in decision.skipped],
            "cause": cause_line(incident),
        }
        events.append(_instant(f"decision: {decision.rung}", CONTROLLER_THREAD, at_s, "decision", about))
    return events


def _complete(span: Span, thread: int, offset_s: float, category: str, arguments: dict[str, Any]) -> Event:
    # Both ends are rounded, not the length: what ends where the next begins must not overlap it afterwards.
    began, ended = _microseconds(offset_s + span.began_s), _microseconds(offset_s + span.ended_s)
    return {
        "name": span.name,
        "cat": category,
        "ph": "X",
        "ts": began,
        "dur": ended - began,
        "pid": PROCESS,
        "tid": thread,
        "args": arguments,
    }


def _instant(name: str, thread: int, at_s: float, category: str, arguments: dict[str, Any]) -> Event:
    return {
        "name": name,
        "cat": category,
        "ph": "i",
        "s": "t",
        "ts": _microseconds(at_s),
        "pid": PROCESS,
        "tid": thread,
        "args": arguments,
    }


def _microseconds(seconds: float) -> int:
    return round(finite(seconds) * MICROSECONDS_PER_S)
