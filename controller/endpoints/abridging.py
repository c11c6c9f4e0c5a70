"""Keeps a status small enough for one answer, however long a job's history is and however many ranks it has.

What an operator looks at first stays whole: ranks, nodes, budgets, the latest incident. Of the incidents before it goes
first what each rank did, then the earliest incidents themselves; of the standing faults, those that are the oldest.
How many were left out is said. The journal keeps all of it.
"""

from bisect import bisect_right
from itertools import islice

import msgspec

from ...protocol.incidents import Incident, JobStatus, StandingFault
from ...protocol.types import FaultReport
from .control_requests import IncidentsReply

MOST_BYTES = 6 * 1024 * 1024  # less than an answer may have, since sizes are estimated
PAGE_BYTES = 1024 * 1024  # of incidents: what is encoded at once
_FAULT_SHARE = 8  # faults get this part of it
_MOST_NAMED = 64  # reports, decisions or ranks of one abridged incident

# In msgpack, generously: what is measured this way costs nothing, while encoding a long history takes seconds.
_EACH_BYTES = 400
_RANK_PHASE_BYTES = 56
_PID_BYTES = 12
_RANK_BYTES = 6
_RANK_STATUS_BYTES = 130
_NODE_STATUS_BYTES = 200


def page(incidents: tuple[Incident, ...], after: int) -> IncidentsReply:
    """Return the incidents that come after a number, about so many as fit a page. One that fits no answer is short."""
    begin = bisect_right(incidents, after, key=lambda incident: incident.number)
    room, end = PAGE_BYTES, begin
    while end < len(incidents) and (room > 0 or end == begin):
        room -= _size_of(incidents[end])
        end += 1
    told = incidents[begin:end]
    if room < PAGE_BYTES - MOST_BYTES:  # only the last one of a page can be as large as that
        told = (*told[:-1], _short(told[-1]))
    return IncidentsReply(told, end < len(incidents))


class Abridger:
    """Makes the short forms of incidents, once each: an incident that is over does not change any more."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._short: dict[int, tuple[Incident, Incident]] = {}  # by number: as it is, and its short form

    def abridged(self, status: JobStatus) -> JobStatus:
        """Return the status as it is if it has at most so many bytes, else with less of its history."""
        faults = _latest_faults(status.faults, self._most_bytes // _FAULT_SHARE)
        room = self._most_bytes - sum(map(_size_of_fault, faults))
        room -= _RANK_STATUS_BYTES * len(status.ranks) + _NODE_STATUS_BYTES * len(status.nodes)
        incidents = self._latest_incidents(status.incidents, room)
        return msgspec.structs.replace(
            status,
            faults=faults,
            faults_left_out=len(status.faults) - len(faults),
            incidents=incidents,
            incidents_left_out=len(status.incidents) - len(incidents),
        )

    def _latest_incidents(self, incidents: tuple[Incident, ...], room: int) -> tuple[Incident, ...]:
        if sum(map(_size_of, incidents)) <= room:
            return incidents
        kept: list[Incident] = []
        whole = room * 3 // 4
        for incident in reversed(incidents):
            whole -= _size_of(incident)  # once there is no room for a whole one, the earlier ones are short, too
            told = incident if whole >= 0 else self._short_form(incident)
            room -= _size_of(told)
            if room < 0:
                break
            kept.append(told)
        return tuple(reversed(kept))

    def _short_form(self, incident: Incident) -> Incident:
        known = self._short.get(incident.number)
        if known is None or known[0] is not incident:
            known = self._short[incident.number] = (incident, _short(incident))
        return known[1]


def _latest_faults(faults: tuple[StandingFault, ...], room: int) -> tuple[StandingFault, ...]:
    kept: list[StandingFault] = []
    for fault in reversed(faults):
        room -= _size_of_fault(fault)
        if room < 0:
            break
        kept.append(fault)
    return tuple(reversed(kept))


def _short(incident: Incident) -> Incident:
    """Return an incident without what each rank did. Which healthy process was not kept, if any, is still seen."""
    short = incident.without_ranks()
    return msgspec.structs.replace(
        short,
        reports=incident.reports[:_MOST_NAMED],
        decisions=incident.decisions[-_MOST_NAMED:],
        phases=incident.phases[-_MOST_NAMED:],
        generations=incident.generations[-_MOST_NAMED:],
        replaced=incident.replaced[:_MOST_NAMED],
        pids_before=dict(islice(short.pids_before.items(), _MOST_NAMED)),
        pids_after=dict(islice(short.pids_after.items(), _MOST_NAMED)),
        repair_reasons=incident.repair_reasons[:_MOST_NAMED],
    )


def _size_of(incident: Incident) -> int:
    size = _EACH_BYTES + _RANK_PHASE_BYTES * len(incident.rank_phases) + _RANK_BYTES * len(incident.replaced)
    size += _PID_BYTES * (len(incident.pids_before) + len(incident.pids_after))
    size += sum(map(_size_of_report, incident.reports)) + sum(map(len, incident.repair_reasons))
    skipped = (skipped for decision in incident.decisions for skipped in decision.skipped)
    size += sum(_EACH_BYTES + len(decision.reason) for decision in incident.decisions)
    size += sum(_RANK_PHASE_BYTES + len(each.reason) for each in skipped)
    return size + _RANK_PHASE_BYTES * len(incident.phases) + len(incident.ended_reason)


def _size_of_fault(fault: StandingFault) -> int:
    return _size_of_report(fault.report)


def _size_of_report(report: FaultReport) -> int:
    texts = (report.detail, report.meaning, report.output)
    names = (*texts, report.seen_by, report.node or "", report.code or "", report.fault_id)
    return _EACH_BYTES + sum(map(len, names))
