"""The parts of a job's status that are sent to the page, each by itself, and only when it has changed. Pure.

What grows with the job is sent in runs of equal values, as neighbours mostly are: 10,000 ranks that do the same are one
run. Words come from the views of the command line, so that a page and a terminal say the same.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from ...policies.schema import Policy
from ...protocol.incidents import (
    BudgetUse,
    Incident,
    JobStatus,
    NodeStatus,
    Outcome,
    RankStatus,
    ReportedSeries,
    leader_of,
)
from ...protocol.time_spent import TimeCategory, TimeSpent
from ...protocol.types import StandbyDepth
from ...protocol.wording import numbers_text
from ..views.causes import cause_line, level_text, place_text, report_groups
from ..views.controls_text import record_text, standing
from ..views.kept_state import host_copies, last_vote
from ..views.report_text import outcome_line
from ..views.status_view import SHOWN_SLOWNESS
from ..views.time_text import MEANING
from ..views.timeline import incident_end_s, phase_seconds
from ..views.wording import cell, duration_text, size_text, telling_line
from .sentence import WholeJob, sentence

MOST_INCIDENTS = 100
MOST_FAULTS = 50
MOST_CAUSES = 12
MOST_REASONS = 20
MOST_RECORDS = 30
_OUTPUT_LINES = 12
_Value = TypeVar("_Value")
_Span = tuple[float, float | None]


class Checkpoint(msgspec.Struct, frozen=True):
    """The newest complete checkpoint. `written_s`: wall-clock seconds."""

    step: int
    written_s: float


class Looked(msgspec.Struct, frozen=True):
    """One look at a job. `note`: why the status is not live. `policy`: its text, and `in_force` what it says.

    `can_create_nodes`: None: that is not known here. `changes`: how many while the job ran are in `in_force`; -1: that
    is not known. `forecast`: the one that was kept with the job. `whole`: of a role, the job that it belongs to.
    """

    status: JobStatus
    note: str = ""
    policy: str = ""
    checkpoint: Checkpoint | None = None
    in_force: Policy | None = None
    can_create_nodes: bool | None = None
    changes: int = -1
    forecast: TimeSpent | None = None
    whole: WholeJob | None = None


class SectionWriter:
    """Writes the parts of the page. An incident that is over is put into words once."""

    def __init__(self) -> None:
        self._ended: dict[int, tuple[_Span, dict[str, Any]]] = {}  # by number: when it was, in words

    def write(self, looked: Looked) -> dict[str, bytes]:
        """Return the parts by name, each as one line of JSON."""
        status = looked.status
        told = status.incidents[-MOST_INCIDENTS:]
        self._ended = {each.number: self._told(each, status.at_s) for each in told if each.outcome is not Outcome.OPEN}
        parts: dict[str, Any] = {
            "head": _head(looked),
            "world": _world(status),
            "beat": _beat(status),
            "time": _time(status, looked.forecast),
            "budgets": [_budget(status, each) for each in status.budgets],
            "incidents": {
                "ended": [words for _, words in self._ended.values()],
                "earlier": len(status.incidents) - len(told) + status.incidents_left_out,
            },
            "incident": next((_incident(each, status.at_s) for each in told if each.outcome is Outcome.OPEN), None),
            "control": _control(status),
            "operators": _operators(status),
            "reserves": _reserves(looked),
            "reported": [_reported(each) for each in status.reported],
            "policy": {"text": looked.policy, "injects": looked.in_force is None or looked.in_force.allow_inject},
        }
        return {name: msgspec.json.encode(part) for name, part in parts.items()}

    def _told(self, incident: Incident, at_s: float) -> tuple[_Span, dict[str, Any]]:
        known, span = self._ended.get(incident.number), (incident.began_s, incident.resumed_s)
        if known is not None and known[0] == span:  # else it is another one: a role that has begun again counts again
            return known
        return span, _incident(incident, at_s)


def node_data(status: JobStatus, name: str) -> dict[str, Any] | None:
    """Return one node with its ranks, for a closer look; None: the job has no such node."""
    node = next((each for each in status.nodes if each.node == name), None)
    if node is None:
        return None
    ranks = [msgspec.to_builtins(rank) for rank in status.ranks if rank.node == name]
    return {**_node(node), "note": telling_line(node.note), "of_ranks": ranks, "built": _built(node)}


def runs(values: Iterable[_Value]) -> list[tuple[_Value, int]]:
    """Return values as runs: each value with how often it follows itself."""
    found: list[tuple[_Value, int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found


def _head(looked: Looked) -> dict[str, Any]:
    status, said = looked.status, sentence(looked.status, looked.note, looked.whole)
    return {
        "job": cell(status.job),
        "mood": str(said.mood),
        "headline": said.headline,
        "figures": said.figures,
        "asks": said.asks,
        "phase": status.phase,
        "generation": status.generation,
        "at_s": status.at_s,
        "began_s": status.time.began_s if status.time is not None else None,
        "live": not looked.note,
        "note": looked.note,
        "ended": status.exit_code is not None,
    }


def _world(status: JobStatus) -> dict[str, Any]:
    place = {node.node: number for number, node in enumerate(status.nodes)}
    roles, of_rank = _named(rank.role for rank in status.ranks)
    return {
        "nodes": [_node(node) for node in status.nodes],
        "asked": status.ranks_asked,
        "ranks": runs(rank.rank - number for number, rank in enumerate(status.ranks)),
        "node": runs(place.get(rank.node, -1) for rank in status.ranks),
        "life": runs(rank.incarnation for rank in status.ranks),
        "roles": roles,
        "role": of_rank,
    }


def _node(node: NodeStatus) -> dict[str, Any]:
    return {
        "name": node.node,
        "domain": cell(node.failure_domain),
        "state": node.state,
        "ranks": numbers_text(node.ranks),
        "failures": node.failures,
    }


def _built(node: NodeStatus) -> list[str]:
    """Say what is prepared on a node for a fault."""
    return [each.in_words() for each in node.prepared]


def _beat(status: JobStatus) -> dict[str, Any]:
    states, state = _named(rank.state for rank in status.ranks)
    activities, activity = _named(rank.activity for rank in status.ranks)
    top = max((rank.step for rank in status.ranks), default=0)
    return {
        "top": top,
        "behind": runs(top - rank.step for rank in status.ranks),
        "slowness": runs(_slowness(rank) for rank in status.ranks),
        "states": states,
        "state": state,
        "activities": activities,
        "activity": activity,
    }


def _slowness(rank: RankStatus) -> float:
    """Return in tenths how many times as long as others a rank computes; 0: not compared; 1: no longer than others."""
    return round(rank.slowness, 1) if rank.slowness >= SHOWN_SLOWNESS else float(rank.slowness > 0.0)


def _named(values: Iterable[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """Return texts as a list of those that there are, and runs of places in it."""
    names: dict[str, int] = {}
    found = runs(names.setdefault(value, len(names)) for value in values)
    return [cell(name) for name in names], found


def _time(status: JobStatus, forecast: TimeSpent | None) -> dict[str, Any]:
    spent, foreseen = status.time, None if forecast is None else forecast.goodput
    if spent is None or spent.wall_s <= 0.0:
        return {"goodput": None, "parts": [], "lately": [], "wall_s": 0.0, "forecast": foreseen}
    parts = [
        {
            "name": str(each),
            "meaning": MEANING[each],
            "share": spent.seconds[each] / spent.wall_s,
            "took": duration_text(spent.seconds[each]),
        }
        for each in TimeCategory
        if spent.seconds.get(each, 0.0) > 0.0
    ]
    lately = [{"window": _window(each), "goodput": each.goodput} for each in status.time_lately]
    told = {"goodput": spent.goodput, "parts": parts, "lately": lately, "wall_s": spent.wall_s}
    return {**told, "forecast": foreseen}


def _window(spent: TimeSpent) -> str:
    hours = round(spent.wall_s / 3600)
    if hours <= 1:
        return "last hour"
    return "last day" if hours == 24 else f"last {hours // 24} days"


def _reported(series: ReportedSeries) -> dict[str, Any]:
    """Return one value of the script; numbers of no size, which JSON lacks, are null."""
    return {
        "name": cell(series.name),
        "rank": series.rank,
        "last": f"{series.values[-1]:.6g}",
        "steps": series.steps,
        "values": series.values,
    }


def _budget(status: JobStatus, budget: BudgetUse) -> dict[str, Any]:
    return {
        "name": budget.name,
        "used": budget.used,
        "limit": budget.limit,
        "outlook": outlook(status, budget.used, budget.limit),
    }


def outlook(status: JobStatus, used: int, limit: int) -> str:
    """Say how long what is left of a budget lasts, when it is spent as it has been so far."""
    if not limit:
        return "not allowed"
    if used >= limit:
        return "spent"
    wall_s = 0.0 if status.time is None else status.time.wall_s
    if not used or wall_s <= 0.0 or status.exit_code is not None:
        return f"{limit - used} left"
    return f"{limit - used} left, for {duration_text((limit - used) * wall_s / used)} at the rate so far"


def _incident(incident: Incident, at_s: float) -> dict[str, Any]:
    ended_s = incident_end_s(incident, at_s)
    return {
        "number": incident.number,
        "began_s": incident.began_s,
        "ended_s": ended_s,
        "took": duration_text(ended_s - incident.began_s),
        "outcome": str(incident.outcome),
        "rung": None if incident.rung is None else str(incident.rung),
        "line": outcome_line(incident, at_s).plain,
        "cause": telling_line(cause_line(incident)),
        "causes": list(_causes(incident)),
        "decisions": list(_decisions(incident)),
        "phases": [{"name": name, "seconds": took_s} for name, took_s in phase_seconds(incident, at_s).items()],
        "state": _state(incident),
        "ended": telling_line(incident.ended_reason),
        "output": list(_output(incident)),
    }


def _causes(incident: Incident) -> Iterable[str]:
    for group in report_groups(incident)[:MOST_CAUSES]:
        parts = (
            str(group.first.kind),
            place_text(group.ranks, group.nodes),
            level_text(group.first),
            telling_line(group.first.detail),
        )
        seen = f"seen by {cell(group.first.seen_by)}" if group.count == 1 else f"{group.count} reports"
        yield f"{': '.join(part for part in parts if part)} ({seen})"


def _decisions(incident: Incident) -> Iterable[dict[str, Any]]:
    for number, decision in enumerate(incident.decisions[-MOST_REASONS:], start=1):
        yield {
            "rung": str(decision.rung),
            "reason": telling_line(decision.reason),
            "failed": number < len(incident.decisions[-MOST_REASONS:]),
            "passed_over": [
                {"rung": str(each.rung), "reason": telling_line(each.reason)}
                for each in decision.skipped[:MOST_REASONS]
            ],
        }


def _state(incident: Incident) -> list[str]:
    told = [telling_line(reason) for reason in incident.repair_reasons[:MOST_REASONS]]
    if incident.resumed_step is not None:
        told.append(f"resumed at step {incident.resumed_step:,}, {incident.committed_before:,} were committed")
    return told


def _output(incident: Incident) -> Sequence[str]:
    """Return the last words of the process that ended first."""
    for group in report_groups(incident):
        lines = [telling_line(line) for line in group.first.output.splitlines() if line.strip()]
        if lines:
            return lines[-_OUTPUT_LINES:]
    return ()


def _control(status: JobStatus) -> dict[str, Any]:
    leader = leader_of(status.controllers)
    return {
        "term": status.term,
        "paused_until_s": status.failover_paused_until_s,
        "controllers": [
            {
                "name": cell(each.name),
                "host": cell(each.host),
                "pid": each.pid,
                "phase": str(each.phase),
                "leads": each is leader,
                "since_s": each.since_s,
            }
            for each in status.controllers
        ],
        "refused": [[cell(reason), status.refused[reason]] for reason in sorted(status.refused)],
    }


def _operators(status: JobStatus) -> dict[str, Any]:
    records = status.controls.records[-MOST_RECORDS:]
    return {
        "paused": status.controls.pause is not None,
        "standing": list(standing(status)),
        "records": [record_text(each) for each in reversed(records)],
        "earlier": status.controls.counted - len(records),
    }


def _reserves(looked: Looked) -> dict[str, Any]:
    status = looked.status
    prepared = [each for node in status.nodes for each in node.prepared]
    built = [rank for each in prepared if each.depth is StandbyDepth.BUILT for rank in each.ranks]
    imported = sum(each.depth is StandbyDepth.IMPORTED for each in prepared)
    return {
        "spares": [cell(node.node) for node in status.nodes if node.state == "spare"],
        "built": numbers_text(built),
        "imported": imported,
        "checkpoint": None if looked.checkpoint is None else msgspec.to_builtins(looked.checkpoint),
        "held": _held(status),
        "faults": [
            {
                "level": str(fault.report.level),
                "place": place_text(
                    () if fault.report.rank is None else (fault.report.rank,),
                    () if fault.report.node is None else (fault.report.node,),
                ),
                "says": telling_line(fault.report.meaning or fault.report.detail),
                "since_s": fault.since_s,
            }
            for fault in status.faults[-MOST_FAULTS:]
        ],
    }


def _held(status: JobStatus) -> list[tuple[str, str]]:
    """Return the copies and the vote by name. What the loss of each node would cost is left out: it takes long."""
    copies, vote = host_copies(status), last_vote(status)
    told = [] if copies is None else [("host copies", f"{copies.in_words()}; {size_text(copies.memory_bytes)}")]
    return told if vote is None else [*told, ("votes", vote.in_words())]
