"""The record of incidents, written as they unfold: what `midstep report` shows.

Kept apart from the machine so that deciding and remembering do not mix: the machine says what happens, this turns it
into `Incident` records with phases, decisions and reasons.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ...protocol.incidents import HoldRecord, Incident, Outcome, PhaseRecord, RankPhase
from ...protocol.types import Decision, FaultReport, RestoreSource

MAX_INCIDENTS = 1000
MAX_REPORTS_PER_INCIDENT = 200
MAX_ROWS = 100_000  # of all incidents that have ended: what each rank did, and its process ids


@dataclass
class History:
    """All incidents of a job; the last one may be open."""

    holds: list[HoldRecord] = field(default_factory=list)  # the latest ones
    ignored: dict[str, int] = field(default_factory=dict)  # reports that changed nothing, by the reason
    _incidents: list[Incident] = field(default_factory=list)
    # Of the latest incident, not yet in it: there is one for each rank and phase.
    _rows: list[RankPhase] = field(default_factory=list)

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, the latest ones of a long history."""
        self._enter_rows()
        return self._incidents

    @property
    def open(self) -> Incident | None:
        """The incident that has not ended, if there is one."""
        if self._incidents and self._incidents[-1].outcome is Outcome.OPEN:
            return self._incidents[-1]
        return None

    def report(self, report: FaultReport, pids: Mapping[int, int], now: float, committed: int) -> bool:
        """Add a fault report to the open incident, or open one with it; say whether one was opened."""
        opened = self.open is None
        if opened:
            self._enter_rows()
            number = self._incidents[-1].number + 1 if self._incidents else 1
            began_s = min(report.at_s, now)
            self._incidents.append(
                Incident(number=number, began_s=began_s, pids_before=dict(pids), committed_before=committed)
            )
            del self._incidents[:-MAX_INCIDENTS]
            self._shorten()
        current = self._incidents[-1]
        if len(current.reports) < MAX_REPORTS_PER_INCIDENT:
            self._change(reports=(*current.reports, report), began_s=min(current.began_s, report.at_s))
        return opened

    def plan(self, report: FaultReport, pids: Mapping[int, int], now: float, committed: int) -> None:
        """Open an incident that begins now, whenever its cause was seen: what was prepared while all went on."""
        self.report(report, pids, now, committed)
        self._change(began_s=now)

    def decided(self, decision: Decision) -> None:
        """Remember what was decided, with its reasons."""
        if self.open:
            self._change(decisions=(*self.open.decisions, decision))

    def opened(self, generation: int, replaced: Iterable[int]) -> None:
        """Remember that a generation was opened and whose processes it replaces."""
        if self.open:
            ranks = tuple(sorted({*self.open.replaced, *replaced}))
            self._change(generations=(*self.open.generations, generation), replaced=ranks)

    def replaced(self, ranks: Iterable[int]) -> None:
        """Remember whose processes end, also of ranks that the next generation does not have."""
        if self.open:
            self._change(replaced=tuple(sorted({*self.open.replaced, *ranks})))

    def entered(self, name: str, generation: int, now: float) -> None:
        """Close the phase that was under way and begin the next."""
        if self.open:
            phases = [self._ended(phase, now) for phase in self.open.phases]
            self._change(phases=(*phases, PhaseRecord(generation, name, now)))

    def rank_phases(self, generation: int, rank: int, phases_s: Mapping[str, float]) -> None:
        """Add one rank's own timings."""
        if self.open:
            self._rows += (RankPhase(generation, rank, name, duration) for name, duration in phases_s.items())

    def planned(
        self, restore: RestoreSource, reasons: tuple[str, ...], target: int, committed: int, *, is_current: bool
    ) -> None:
        """Remember where state comes from, and the step that will be repeated.

        `is_current`: `committed` is how far training was when it was interrupted, and not only what was last known.
        """
        if self.open:
            self._change(
                restore=restore,
                repair_reasons=reasons,
                resumed_step=target,
                committed_before=max(self.open.committed_before, committed),
                committed_is_known=is_current,
            )

    def moved(self, size_bytes: int, *, over_devices: int = 0) -> None:
        """Add bytes that a rank received, and how many of these came over the devices' own links."""
        if self.open and size_bytes:
            of_devices = self.open.bytes_over_devices + over_devices
            self._change(bytes_moved=self.open.bytes_moved + size_bytes, bytes_over_devices=of_devices)

    def resumed(self, at_s: float, pids: Mapping[int, int], median_step_s: float) -> None:
        """Close the incident: the first new step is committed everywhere, at `at_s`, but not before what led to it."""
        if self.open:
            at_s = max(at_s, self.open.began_s, *(phase.began_s for phase in self.open.phases))
            phases = tuple(self._ended(phase, at_s) for phase in self.open.phases)
            self._change(
                phases=phases,
                resumed_s=at_s,
                pids_after=dict(pids),
                median_step_s=median_step_s,
                outcome=Outcome.RESUMED,
                ended_reason="all ranks have committed the repeated step",
            )

    def dismissed(self, now: float, reason: str) -> None:
        """Close the incident: nothing was wrong."""
        if self.open:
            phases = tuple(self._ended(phase, now) for phase in self.open.phases)
            self._change(phases=phases, outcome=Outcome.DISMISSED, ended_reason=reason)

    def stopped(self, now: float, pids: Mapping[int, int], reason: str) -> None:
        """Close the incident: the job stops."""
        if self.open:
            phases = tuple(self._ended(phase, now) for phase in self.open.phases)
            self._change(phases=phases, pids_after=dict(pids), outcome=Outcome.STOPPED, ended_reason=reason)

    def _enter_rows(self) -> None:
        if self._rows:
            self._change(rank_phases=(*self._incidents[-1].rank_phases, *self._rows))
            self._rows = []

    def _shorten(self) -> None:
        """Leave out what each rank did in the earliest incidents, so that the history of a big job stays small."""
        room = MAX_ROWS
        for index in range(len(self._incidents) - 2, -1, -1):
            incident = self._incidents[index]
            if incident.abridged:
                return
            room -= len(incident.rank_phases) + len(incident.pids_before) + len(incident.pids_after)
            if room < 0:
                self._incidents[index] = incident.without_ranks()

    @staticmethod
    def _ended(phase: PhaseRecord, now: float) -> PhaseRecord:
        if phase.ended_s is not None:
            return phase
        return msgspec.structs.replace(phase, ended_s=max(now, phase.began_s))

    def _change(self, **fields: object) -> None:
        self._incidents[-1] = msgspec.structs.replace(self._incidents[-1], **fields)
