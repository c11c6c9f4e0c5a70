"""Computes where each phase of an incident lies in time, for text bars, picture and trace.

The controller's phases have a beginning and an end. A rank's phases are lengths only, on its own clock, so each is
laid where the controller ordered it: stop, clean and join from the start of quiescing; rebuild, repair and rollback
from the start of rejoining. Lengths are exact; places are as good as the delivery of a command is quick.
"""

from collections.abc import Mapping
from math import isfinite

import msgspec

from ...protocol.incidents import Incident, Outcome, PhaseRecord, RankPhase
from ...protocol.types import FaultKind
from .causes import is_echo
from .wording import cell

DETECTING = "detecting"  # from the fault to the first report at the controller
QUIESCING = "quiescing"
REJOINING = "rejoining"
EARLY_PHASES = ("stop", "clean", "join")
LATE_PHASES = ("rebuild", "repair", "rollback")
RANK_PHASES = EARLY_PHASES + LATE_PHASES
# Pale, so that the controller's phases are not taken for a rank's; each is named where it is drawn or in the legend.
PHASE_COLOURS = {
    "detecting": "#DDDDDD",
    "suspecting": "#F5EE9E",
    "quiescing": "#F2CFA6",
    "rejoining": "#A9CBE8",
    "resuming": "#B5E0CF",
}
UNKNOWN_PHASE_COLOUR = "#CCCCCC"
FAULT_COLOUR = "#CC0000"
FAULT_LETTER = "X"


class Span(msgspec.Struct, frozen=True):
    """A phase from `began_s` to `ended_s`, in seconds since the incident began."""

    name: str
    generation: int
    began_s: float
    ended_s: float

    @property
    def length_s(self) -> float:
        """Seconds that the phase took."""
        return self.ended_s - self.began_s


class FaultMark(msgspec.Struct, frozen=True):
    """A fault report as a point in time, in seconds since the incident began."""

    kind: FaultKind
    at_s: float
    rank: int | None
    node: str | None
    detail: str
    seen_by: str
    echo: bool  # it follows from another fault


class IncidentTimeline(msgspec.Struct, frozen=True):
    """An incident laid out from 0 to `length_s`: the controller's phases, each rank's phases, the faults."""

    length_s: float
    phases: tuple[Span, ...]
    lanes: dict[int, tuple[Span, ...]]
    marks: tuple[FaultMark, ...]

    @property
    def generations(self) -> tuple[int, ...]:
        """The generations in which a rank went through a phase, in order."""
        return tuple(sorted({span.generation for lane in self.lanes.values() for span in lane}))

    def lanes_of(self, generation: int) -> dict[int, tuple[Span, ...]]:
        """Return the ranks' phases in one generation, without the ranks that have none."""
        lanes = {
            rank: tuple(span for span in lane if span.generation == generation) for rank, lane in self.lanes.items()
        }
        return {rank: lane for rank, lane in lanes.items() if lane}


def newcomers(lanes: Mapping[int, tuple[Span, ...]]) -> frozenset[int]:
    """Return the ranks whose process came new: it joined instead of stopping."""
    return frozenset(rank for rank, lane in lanes.items() if any(span.name == "join" for span in lane))


def window_of(lanes: Mapping[int, tuple[Span, ...]]) -> tuple[float, float]:
    """Return the seconds from the first beginning to the last end of these phases."""
    spans = [span for lane in lanes.values() for span in lane]
    return min(span.began_s for span in spans), max(span.ended_s for span in spans)


def lay_out(incident: Incident, until_s: float | None = None) -> IncidentTimeline:
    """Lay an incident out in time. `until_s`: wall-clock seconds up to which an open incident is drawn."""
    end_s = incident_end_s(incident, until_s)
    phases = _controller_spans(incident, end_s)
    lanes = _lanes(incident)
    marks = tuple(
        FaultMark(
            kind=report.kind,
            at_s=max(0.0, finite(report.at_s - incident.began_s)),
            rank=report.rank,
            node=report.node,
            detail=report.detail,
            seen_by=report.seen_by,
            echo=is_echo(report, incident),
        )
        for report in incident.reports
    )
    points = [finite(end_s - incident.began_s), *(span.ended_s for span in phases), *(mark.at_s for mark in marks)]
    points.extend(span.ended_s for lane in lanes.values() for span in lane)
    return IncidentTimeline(length_s=max(0.0, *points), phases=phases, lanes=lanes, marks=marks)


def finite(seconds: float) -> float:
    """Return a time that was reported, and 0 for one that no clock can have shown."""
    return seconds if isfinite(seconds) else 0.0


def incident_end_s(incident: Incident, until_s: float | None) -> float:
    """Return when an incident ended, in wall-clock seconds: the resumed step, else the last thing known of it."""
    if incident.resumed_s is not None:
        return incident.resumed_s if isfinite(incident.resumed_s) else incident.began_s
    known = [incident.began_s]
    for phase in incident.phases:
        known.append(phase.began_s if phase.ended_s is None else phase.ended_s)
    known.extend(report.at_s for report in incident.reports)
    if incident.outcome is Outcome.OPEN and until_s is not None:
        known.append(until_s)
    return max(filter(isfinite, known), default=0.0)


def phase_seconds(incident: Incident, until_s: float | None = None) -> dict[str, float]:
    """Return the seconds per controller phase, in order, over all attempts. Resumed: they are the recovery time."""
    seconds: dict[str, float] = {}
    for span in _controller_spans(incident, incident_end_s(incident, until_s)):
        seconds[span.name] = seconds.get(span.name, 0.0) + span.length_s
    return seconds


def slowest_rank_seconds(incident: Incident) -> dict[str, float]:
    """Return, for each phase of the lifecycle, the seconds of the rank that took longest in any attempt."""
    slowest: dict[str, float] = {}
    for phase in incident.rank_phases:
        slowest[phase.name] = max(slowest.get(phase.name, 0.0), phase.duration_s)
    return {name: slowest[name] for name in sorted(slowest, key=_phase_order)}


def _controller_spans(incident: Incident, end_s: float) -> tuple[Span, ...]:
    if not incident.phases:
        return ()
    ordered = sorted(incident.phases, key=lambda phase: phase.began_s)
    first_s = finite(ordered[0].began_s - incident.began_s)
    spans = []
    if first_s > 0:
        spans.append(Span(DETECTING, ordered[0].generation, 0.0, first_s))
    for phase in ordered:
        began_s = max(0.0, finite(phase.began_s - incident.began_s))
        closes = phase is ordered[-1] and incident.outcome is Outcome.RESUMED
        # The last phase is over when the last rank says so, not when the controller hears of it.
        ended_s = end_s if closes or phase.ended_s is None else phase.ended_s
        spans.append(
            Span(cell(phase.name), phase.generation, began_s, max(began_s, finite(ended_s - incident.began_s)))
        )
    return tuple(spans)


def _lanes(incident: Incident) -> dict[int, tuple[Span, ...]]:
    starts = _starts(incident.phases, incident.began_s)
    lanes: dict[int, list[Span]] = {}
    for phase in sorted(incident.rank_phases, key=_rank_phase_order):
        lane = lanes.setdefault(phase.rank, [])
        name = QUIESCING if phase.name in EARLY_PHASES else REJOINING
        ordered_s = starts.get((phase.generation, name), 0.0)
        began_s = max(ordered_s, lane[-1].ended_s) if lane else ordered_s
        lane.append(Span(cell(phase.name), phase.generation, began_s, began_s + finite(phase.duration_s)))
    return {rank: tuple(lanes[rank]) for rank in sorted(lanes)}


def _starts(phases: tuple[PhaseRecord, ...], origin_s: float) -> dict[tuple[int, str], float]:
    return {(phase.generation, phase.name): max(0.0, finite(phase.began_s - origin_s)) for phase in reversed(phases)}


def _rank_phase_order(phase: RankPhase) -> tuple[int, int]:
    return phase.generation, _phase_order(phase.name)


def _phase_order(name: str) -> int:
    return RANK_PHASES.index(name) if name in RANK_PHASES else len(RANK_PHASES)


class Look(msgspec.Struct, frozen=True):
    """The look of a phase: colour, hatching (picture), letter (text)."""

    colour: str
    hatch: str
    letter: str


RANK_LOOKS = {
    "stop": Look("#D55E00", "", "s"),
    "clean": Look("#E69F00", "///", "c"),
    "join": Look("#CC79A7", "", "j"),
    "rebuild": Look("#0072B2", "", "b"),
    "repair": Look("#009E73", "\\\\\\", "r"),
    "rollback": Look("#56B4E9", "...", "o"),
}
UNKNOWN_LOOK = Look("#999999", "xxx", "?")


def rank_look(name: str) -> Look:
    """Return how a rank's phase is drawn."""
    return RANK_LOOKS.get(name, UNKNOWN_LOOK)


def phase_colour(name: str) -> str:
    """Return the colour of a controller phase."""
    return PHASE_COLOURS.get(name, UNKNOWN_PHASE_COLOUR)
