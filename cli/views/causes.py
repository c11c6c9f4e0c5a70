"""Finds the report that tells what went wrong among the many of an incident, and says it in one line.

A dead process makes every other rank's collectives fail, and a stalled one or a lost node makes all others wait: those
reports are echoes, and often the first to arrive.
"""

import msgspec

from ...protocol.incidents import Incident
from ...protocol.types import FaultKind, FaultLevel, FaultReport
from ...protocol.wording import FAULT_WORDS, ranks_text
from .wording import cell, telling_line

ECHOES = frozenset({FaultKind.COMMUNICATION, FaultKind.LINK_UP})


class ReportGroup(msgspec.Struct, frozen=True):
    """Reports of one kind that say the same; `first` is the earliest of them."""

    first: FaultReport
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    count: int


def root_reports(incident: Incident) -> list[FaultReport]:
    """Return the reports that are no echoes, or all where each is one; the earliest is first."""
    ordered = sorted(incident.reports, key=lambda report: report.at_s)
    return [report for report in ordered if not is_echo(report, incident)] or ordered


def root_report(incident: Incident) -> FaultReport | None:
    """Return the report that names the cause: the earliest that is no echo, or the loss of its node."""
    roots = root_reports(incident)
    if not roots:
        return None
    first = roots[0]
    for report in roots:
        if report.kind is FaultKind.NODE_LOST and report.node is not None and report.node == first.node:
            return report
    return first


def is_echo(report: FaultReport, incident: Incident) -> bool:
    """Tell whether a report only follows from another one: a failed collective, or the wait for what is gone."""
    if report.kind in ECHOES:
        return True
    waits = report.kind is FaultKind.STALL and report.rank is not None and report.rank not in incident.replaced
    return waits and any(
        other.kind is FaultKind.NODE_LOST or (other.kind is FaultKind.STALL and other.rank in incident.replaced)
        for other in incident.reports
    )


def place_text(ranks: tuple[int, ...], nodes: tuple[str, ...]) -> str:
    """Return where something was seen: rank 1 on node-0, node-1, or the empty string."""
    where = ranks_text(ranks) if ranks else ""
    there = ", ".join(nodes)
    return cell(f"{where} on {there}" if where and there else where or there)


def level_text(report: FaultReport) -> str:
    """Return level, code and meaning of a fault of hardware; the empty string for one of software."""
    if report.level is FaultLevel.SOFTWARE or report.kind is FaultKind.NODE_LOST:
        return ""
    code = f" {report.code}" if report.code else ""
    return cell(f"{report.level}{code}" + (f" ({report.meaning})" if report.meaning else ""))


def report_place(report: FaultReport) -> str:
    """Return the rank and node of one report in words."""
    ranks = () if report.rank is None else (report.rank,)
    return place_text(ranks, () if report.node is None else (report.node,))


def cause_line(incident: Incident) -> str:
    """Return the cause in one line: the fault's kind, where, what its observer said, how many more came."""
    root = root_report(incident)
    if root is None:
        return "no fault was reported"
    others = [
        report
        for report in incident.reports
        if report is not root and not is_echo(report, incident) and not _belongs_to(report, root)
    ]
    parts = [str(root.kind), report_place(root), telling_line(root.detail)]
    more = f" (and {len(others)} more fault{'' if len(others) == 1 else 's'})" if others else ""
    return ": ".join(part for part in parts if part) + more


def headline_cause(incident: Incident) -> str:
    """Return the cause in a few words, without the observer's detail."""
    root = root_report(incident)
    if root is None:
        return "no fault was reported"
    place = report_place(root)
    return f"{FAULT_WORDS[root.kind].name}: {place}" if place else FAULT_WORDS[root.kind].name


def report_groups(incident: Incident) -> tuple[ReportGroup, ...]:
    """Return the reports in order of time, those that say the same as one; the cause is first, the echoes are last."""
    members: dict[tuple[FaultKind, str, int, int], list[FaultReport]] = {}
    for report in sorted(incident.reports, key=lambda report: report.at_s):
        # A second fault of the same kind in a later attempt is news; one that came to all ranks at once is not.
        incarnation = 0 if is_echo(report, incident) else report.incarnation
        members.setdefault((report.kind, telling_line(report.detail), report.generation, incarnation), []).append(
            report
        )
    groups = [_group(reports) for reports in members.values()]
    root = root_report(incident)

    def importance(group: ReportGroup) -> tuple[bool, bool, float]:
        return group.first is not root, is_echo(group.first, incident), group.first.at_s

    return tuple(sorted(groups, key=importance))


def _group(reports: list[FaultReport]) -> ReportGroup:
    ranks = sorted({report.rank for report in reports if report.rank is not None})
    nodes = sorted({report.node for report in reports if report.node is not None})
    return ReportGroup(first=reports[0], ranks=tuple(ranks), nodes=tuple(nodes), count=len(reports))


def _belongs_to(report: FaultReport, root: FaultReport) -> bool:
    """Return whether the report is about the same loss: a process of the lost node, or the same incarnation."""
    if root.kind is FaultKind.NODE_LOST:
        return report.node == root.node
    return report.rank == root.rank and report.incarnation == root.incarnation and report.rank is not None
