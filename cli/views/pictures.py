"""Pictures of incidents, and of a forecast.

Of incidents: the controller's phases on top, a lane per rank below, time to the right.
An incident gets a panel of its whole length, and where most of that was waiting (a stall being noticed, a start that
never came) a second one of its last attempt, enlarged. matplotlib is an extra; it is loaded when a picture is asked
for, and needs no display.
"""

from pathlib import Path
from textwrap import shorten
from typing import Any

import msgspec

from ...forecast.outlook import Loss, Outlook
from ...protocol.errors import ConfigurationError
from ...protocol.incidents import Incident, JobStatus
from ...protocol.types import Rung
from . import timeline as times
from .report_text import outcome_line
from .timeline_text import rows_to_show
from .wording import duration_text

FORMATS = (".png", ".svg", ".pdf")
INCIDENTS = 8  # more do not fit on a page that can still be read
WIDTH_INCHES = 12.0
LEFT_INCHES = 1.15
RIGHT_INCHES = 0.2
LANE_INCHES = 0.30
ABOVE_INCHES = 0.42  # a panel's title
BELOW_INCHES = 0.52  # its axis
HEAD_INCHES = 0.95
DOTS_PER_INCH = 130
BAR_HEIGHT = 0.74
NARROWEST_SHARE = 0.002  # of the panel, so that a phase of a millisecond is still seen
LABEL_SHARE = 0.0082  # of the panel per character: a bar that is shorter than its name goes unnamed
ENLARGE_BELOW_SHARE = 0.35  # of the incident: an attempt shorter than that is drawn once more
TITLE_CHARACTERS = 125
CONTROLLER_LANE = 0
SUB_SECOND_S = 1.0
FAULT: dict[str, Any] = {"marker": "X", "color": times.FAULT_COLOUR, "markeredgecolor": "white", "markersize": 10}
ECHO: dict[str, Any] = {"marker": "x", "color": "#666666", "markersize": 5}
SIZE_INCHES = (11.0, 6.2)
HOUR_S = 3600.0
# Okabe and Ito's colours, from green for the cheapest to red for the stop; the markers differ, too.
LOOKS = {
    Rung.RETRY_STEP: ("#009E73", "o"),
    Rung.RECOVER_IN_PLACE: ("#56B4E9", "s"),
    Rung.RECOVER: ("#0072B2", "^"),
    Rung.RESCHEDULE_POD: ("#E69F00", "D"),
    Rung.RESCHEDULE_JOB: ("#CC79A7", "v"),
    Rung.STOP: ("#D55E00", "X"),
}


class Panel(msgspec.Struct, frozen=True):
    """One drawing: an incident's timeline from `began_s` to `ended_s`, for some ranks."""

    title: str
    timeline: times.IncidentTimeline
    ranks: tuple[int, ...]
    began_s: float
    ended_s: float

    @property
    def length_s(self) -> float:
        """Seconds from the left edge to the right edge."""
        return max(self.ended_s - self.began_s, 1e-9)

    @property
    def inches(self) -> float:
        """Height with title and axis."""
        return ABOVE_INCHES + BELOW_INCHES + LANE_INCHES * (len(self.ranks) + 1)

    def clip(self, span: times.Span) -> tuple[float, float] | None:
        """Return the part of a span that lies in the panel, or None."""
        began_s, ended_s = max(span.began_s, self.began_s), min(span.ended_s, self.ended_s)
        return (began_s, ended_s) if ended_s > began_s or span.began_s == span.ended_s == began_s else None


def write_picture(status: JobStatus, incidents: tuple[Incident, ...], path: Path) -> None:
    """Draw the chosen incidents into `path`; its ending says the format.

    Raises ConfigurationError when there is nothing to draw, the format is unknown, matplotlib is missing, or the file
    cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"cannot draw {path}: its name must end in {', '.join(FORMATS)}")
    if not incidents:
        raise ConfigurationError(f"job {status.job} has had no incidents: there is nothing to draw")
    figure = draw(status, incidents)
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error


def draw(status: JobStatus, incidents: tuple[Incident, ...]) -> Any:
    """Return the matplotlib figure of the latest of these incidents. Raises ConfigurationError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            'drawing needs matplotlib, which is not installed; run: pip install "midstep[plot]"'
        ) from error
    shown = incidents[-INCIDENTS:]
    chosen = [panel for incident in shown for panel in panels(incident, status.at_s)]
    total = HEAD_INCHES + sum(panel.inches for panel in chosen)
    figure = Figure(figsize=(WIDTH_INCHES, total))
    top = total - HEAD_INCHES
    wide = (WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES) / WIDTH_INCHES
    for panel in chosen:
        bottom = top - panel.inches + BELOW_INCHES
        high = LANE_INCHES * (len(panel.ranks) + 1)
        axes = figure.add_axes((LEFT_INCHES / WIDTH_INCHES, bottom / total, wide, high / total))
        _draw_panel(axes, panel)
        top -= panel.inches
    part = "" if len(incidents) == len(shown) else f" (the latest {len(shown)} of {len(incidents)} incidents)"
    _draw_heading(figure, f"Job {status.job}{part}", total)
    return figure


def panels(incident: Incident, until_s: float) -> list[Panel]:
    """Return the panels of an incident: the whole of it, and its last attempt when that is too short to be seen."""
    timeline = times.lay_out(incident, until_s)
    lanes = dict(timeline.lanes)
    for mark in timeline.marks:
        if mark.rank is not None:
            lanes.setdefault(mark.rank, ())
    ranks = tuple(rows_to_show(lanes))
    title = shorten(outcome_line(incident, until_s).plain, TITLE_CHARACTERS, placeholder=" ...")
    drawn = [Panel(title, timeline, ranks, 0.0, timeline.length_s)]
    if timeline.generations:
        generation = timeline.generations[-1]
        began_s, ended_s = times.window_of(timeline.lanes_of(generation))
        ended_s = max([ended_s, *(span.ended_s for span in timeline.phases if span.generation == generation)])
        if ended_s - began_s < ENLARGE_BELOW_SHARE * timeline.length_s:
            enlarged = f"Incident {incident.number}, enlarged: its last {duration_text(ended_s - began_s)}"
            drawn.append(Panel(enlarged, timeline, ranks, began_s, ended_s))
    return drawn


def _draw_heading(figure: Any, title: str, total: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.text(0.012, 1 - 0.12 / total, title, fontsize=13, fontweight="bold", va="top", parse_math=False)
    edge: dict[str, Any] = {"linewidth": 0.5, "edgecolor": "black"}
    phases: list[Any] = [Patch(facecolor=colour, label=name, **edge) for name, colour in times.PHASE_COLOURS.items()]
    ranks: list[Any] = [
        Patch(facecolor=look.colour, hatch=look.hatch, label=name, **edge) for name, look in times.RANK_LOOKS.items()
    ]
    marks: list[Any] = [
        Line2D([], [], linestyle="", label=label, **style) for label, style in (("fault", FAULT), ("its echo", ECHO))
    ]
    for row, (name, handles) in enumerate((("controller", phases), ("ranks", [*ranks, *marks]))):
        height = 1 - (0.38 + 0.23 * row) / total
        figure.text(0.012, height - 0.065 / total, name, fontsize=9, va="top", color="#555555")
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.075, height),
            ncols=len(handles),
            frameon=False,
            fontsize=9,
            borderaxespad=0,
            columnspacing=1.4,
        )


def _draw_panel(axes: Any, panel: Panel) -> None:
    unit_s, unit = (1e-3, "ms") if panel.length_s < SUB_SECOND_S else (1.0, "s")
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", parse_math=False)
    for span in panel.timeline.phases:
        ends = panel.clip(span)
        if ends is not None:
            axes.axvspan(
                ends[0] / unit_s, ends[1] / unit_s, color=times.phase_colour(span.name), alpha=0.22, linewidth=0
            )
            _draw_bar(axes, panel, span, CONTROLLER_LANE, unit_s)
    for lane, rank in enumerate(panel.ranks, start=1):
        for span in panel.timeline.lanes.get(rank, ()):
            _draw_bar(axes, panel, span, lane, unit_s)
    _draw_faults(axes, panel, unit_s)
    new = times.newcomers(panel.timeline.lanes)
    names = [f"rank {rank}{' (new)' if rank in new else ''}" for rank in panel.ranks]
    axes.set_yticks(range(len(names) + 1), ["controller", *names], fontsize=9)
    axes.set_ylim(len(names) + 0.5, -0.5)
    margin = 0.008 * panel.length_s
    axes.set_xlim((panel.began_s - margin) / unit_s, (panel.ended_s + margin) / unit_s)
    axes.set_xlabel(f"{unit} since the fault", fontsize=9, labelpad=1)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.axhline(0.5, color="black", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_bar(axes: Any, panel: Panel, span: times.Span, lane: int, unit_s: float) -> None:
    """Draw the part of a phase that lies in the panel, with its name and length in it, as far as they fit."""
    ends = panel.clip(span)
    if ends is None:
        return
    on_controller = lane == CONTROLLER_LANE
    look = times.rank_look(span.name)
    width_s = ends[1] - ends[0]
    axes.barh(
        lane,
        max(width_s, NARROWEST_SHARE * panel.length_s) / unit_s,
        left=ends[0] / unit_s,
        height=BAR_HEIGHT,
        color=times.phase_colour(span.name) if on_controller else look.colour,
        hatch="" if on_controller else look.hatch,
        edgecolor="black",
        linewidth=0.4,
        zorder=2,
    )
    for text in (f"{span.name} {duration_text(span.length_s)}", span.name):
        if width_s >= LABEL_SHARE * len(text) * panel.length_s:
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.0 if on_controller else 0.85, "pad": 0.8}
            middle = (ends[0] + width_s / 2) / unit_s
            axes.text(middle, lane, text, ha="center", va="center", fontsize=8, bbox=box, zorder=3, parse_math=False)
            return


def _draw_faults(axes: Any, panel: Panel, unit_s: float) -> None:
    for mark in panel.timeline.marks:
        if panel.began_s <= mark.at_s <= panel.ended_s:
            lane = panel.ranks.index(mark.rank) + 1 if mark.rank in panel.ranks else CONTROLLER_LANE
            style = ECHO if mark.echo else FAULT
            axes.plot(mark.at_s / unit_s, lane, clip_on=False, zorder=4, **style)


def write_outlook_picture(outlook: Outlook, path: Path) -> None:
    """Draw into `path`; its ending says the format. Raises ConfigurationError: unknown ending, no matplotlib."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"{path}: a picture ends with one of {', '.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("pictures need matplotlib: pip install 'midstep[plot]'") from error
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 1))
    figure.suptitle(
        f"{outlook.ranks} ranks, {outlook.hours:g} h, seed {outlook.seed}: "
        f"{outlook.incidents} incidents, goodput {100 * outlook.goodput:.2f} %"
    )
    for rung, rows in outlook.by_rung().items():
        colour, marker = LOOKS[rung]
        above.scatter(
            [row.at_h for row in rows], [max(row.cost_s, 0.1) for row in rows],
            c=colour, marker=marker, label=f"{rung} ({len(rows)})", s=28,
        )  # fmt: skip
    above.set(yscale="log", xlim=(0, outlook.hours), xlabel="hours", ylabel="lost in one incident")
    if outlook.timeline:
        above.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(Rung), fontsize="small", frameon=False)
        for axis_ticks in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
            axis_ticks(lambda seconds, _: duration_text(seconds))
    lost_h = [outlook.lost_s[loss] / HOUR_S for loss in Loss]
    below.barh([loss.value for loss in Loss], lost_h, color="#999999")
    for place, hours in enumerate(lost_h):
        below.text(hours, place, f" {hours:.2f} h", va="center", fontsize="small")
    below.set(xlabel="hours lost", xlim=(0, 1.15 * max(*lost_h, 0.01)))
    below.invert_yaxis()
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
