"""Keep which nodes were named slow, by how much, and what was done about it: for `midstep report`. Pure.

What a node was named for stands in the fault book only until it is well again, so this looks on after each event, as
the account of time does. It is a part of snapshots, and outlives the events.
"""

from dataclasses import dataclass, field

import msgspec

from ..protocol.incidents import Incident, Outcome
from ..protocol.messages import FaultReported
from ..protocol.slow_records import SlowAnswer, SlowRecord, SlowTold
from ..protocol.types import CONTROLLER, Assertion, FaultKind, FaultReport, Rung
from .journaled import Journaled
from .recovery.state import JobState

MOST_KEPT = 100  # of a job that runs for months the earliest go
_KINDS = frozenset({FaultKind.SLOW, FaultKind.SLOW_LINK, FaultKind.SLOW_INPUT})


@dataclass
class SlowHistory:
    """The records of one job.

    `leaving`: the number of the open incident in which a slow node is left, and how many ranks the world had before it.
    """

    records: list[SlowRecord] = field(default_factory=list)
    left_out: int = 0
    leaving: tuple[int, int] | None = None

    def follow(self, state: JobState, event: Journaled, now: float) -> None:
        """Look on after an event that the machine has just handled at `now`."""
        named = _named_in(event)
        if not named and all(each.until_s is not None for each in self.records):
            return
        standing = {each.report.fault_id: each for each in state.book.standing() if _is_slow(each.report)}
        self._follow_incident(state, now)
        for place, each in enumerate(self.records):
            if each.until_s is None and each.fault_id not in standing:
                self.records[place] = msgspec.structs.replace(each, until_s=now)
        fault = standing.get(named)
        if fault is not None and fault.since_s == now:
            report = fault.report
            record = SlowRecord(named, report.kind, report.node or "", report.detail, now, report.scores)
            self.left_out += len(self.records) >= MOST_KEPT
            self.records = [*self.records[1 - MOST_KEPT :], record]

    def told(self) -> SlowTold:
        """Return the records for a report."""
        return SlowTold(tuple(self.records), self.left_out)

    def _follow_incident(self, state: JobState, now: float) -> None:
        """Note that ranks leave a slow node, and once they have, how that was done."""
        opened = state.history.open
        if opened is not None and self.leaving is None and self._left_in(opened):
            self.leaving = (opened.number, state.world.size)
        if self.leaving is None or (opened is not None and opened.number == self.leaving[0]):
            return
        (number, ranks), self.leaving = self.leaving, None
        ended = next((each for each in state.history.incidents if each.number == number), None)
        if ended is None or ended.outcome is not Outcome.RESUMED:
            return
        answer = _answer(ended, shrunk=state.world.size < ranks)
        for place in self._left_in(ended):
            record = self.records[place]
            if not state.world.on(record.node):
                self.records[place] = msgspec.structs.replace(record, until_s=now, incident=number, answer=answer)

    def _left_in(self, incident: Incident) -> list[int]:
        """Return the places of the records of nodes that are left in an incident."""
        reported = {report.fault_id for report in incident.reports if _is_slow(report)}
        return [place for place, each in enumerate(self.records) if each.until_s is None and each.fault_id in reported]


def _is_slow(report: FaultReport) -> bool:
    return report.kind in _KINDS and report.seen_by == CONTROLLER


def _named_in(event: Journaled) -> str:
    """Return the id of the fault by which an event calls a node slow; empty: it does not."""
    if not isinstance(event, FaultReported) or event.report.assertion is not Assertion.OCCUR:
        return ""
    return event.report.fault_id if _is_slow(event.report) else ""


def _answer(incident: Incident, *, shrunk: bool) -> SlowAnswer:
    if shrunk:
        return SlowAnswer.SHRUNK
    return SlowAnswer.DRAINED if incident.rung is Rung.RECOVER else SlowAnswer.RESTARTED
