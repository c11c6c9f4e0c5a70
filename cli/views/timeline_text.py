"""An incident's timeline for a terminal: a bar per controller phase, and per attempt a table of ranks with bars.

Bars are letters, so that they say the same without colour, in a log file and in an e-mail.
"""

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...protocol.wording import numbers_text
from . import timeline as times
from .wording import ABSENT, duration_text

RANK_ROWS = 16  # of a big world: the newcomers, then the slowest
NARROWEST_BAR = 12
COLUMN_GAP = 2
INDENT = 2

Window = tuple[float, float]  # seconds since the incident began
Lanes = Mapping[int, tuple[times.Span, ...]]


class Cell(msgspec.Struct, frozen=True):
    """One character of a bar, and the colour behind it."""

    letter: str
    colour: str


def timeline_view(timeline: times.IncidentTimeline, width: int) -> RenderableType:
    """Return the timeline at a width in characters: phases first, then one table of ranks for each attempt."""
    parts: list[RenderableType] = []
    if timeline.phases:
        parts.append(_phase_table(timeline, width - INDENT))
    for number, generation in enumerate(timeline.generations, start=1):
        if parts:
            parts.append(Text(""))
        if len(timeline.generations) > 1:
            parts.append(Text(f"attempt {number}, generation {generation}", style="bold"))
        parts.append(_rank_table(timeline.lanes_of(generation), timeline.marks, width - INDENT))
    return Padding(Group(*parts), (0, 0, 0, INDENT))


def legend() -> tuple[Text, Text]:
    """Return what the phases' names and the letters in the ranks' bars mean."""
    phases = Text(
        "phases: detecting = fault to first report; suspecting = which rank is at fault?\n"
        "        quiescing = stop, clean, join; rejoining = rebuild, repair, rollback\n"
        "        resuming = up to the first new step of all ranks",
        style="dim",
    )
    letters = Text("ranks:  ", style="dim")
    for name in times.RANK_PHASES:
        look = times.rank_look(name)
        letters.append(look.letter, style=f"black on {look.colour}")
        letters.append(f" {name}  ", style="dim")
    letters.append(times.FAULT_LETTER, style=f"bold white on {times.FAULT_COLOUR}")
    letters.append(" another fault meanwhile", style="dim")
    return phases, letters


def bar_cells(spans: tuple[times.Span, ...], window: Window, columns: int) -> list[Cell | None]:
    """Lay a rank's spans on `columns` characters. Each gets one at least, moved right where its place is taken."""
    cells: list[Cell | None] = [None] * columns
    taken = 0
    for index, span in enumerate(spans):
        right = columns - (len(spans) - index) + 1  # so that the spans after this one keep a place
        first = max(0, min(max(taken, _column(span.began_s, window, columns)), right - 1))
        taken = max(first + 1, min(_column(span.ended_s, window, columns), right))
        look = times.rank_look(span.name)
        for column in range(first, min(taken, columns)):
            cells[column] = Cell(look.letter, look.colour)
    return cells


def rows_to_show(lanes: Lanes) -> list[int]:
    """Return the ranks to show in full, in order: all, or in a big world the newcomers and the slowest."""
    new = times.newcomers(lanes)

    def importance(rank: int) -> tuple[bool, float]:
        return rank not in new, -sum(span.length_s for span in lanes[rank])

    return sorted(sorted(lanes, key=importance)[:RANK_ROWS])


def _column(at_s: float, window: Window, columns: int) -> int:
    began_s, ended_s = window
    if ended_s <= began_s:
        return 0
    return max(0, min(columns, round((at_s - began_s) / (ended_s - began_s) * columns)))


def _phase_table(timeline: times.IncidentTimeline, width: int) -> Table:
    window = (0.0, timeline.length_s)
    head = ("phase", "generation", "took")
    rows = [(span.name, f"{span.generation}", duration_text(span.length_s)) for span in timeline.phases]
    columns = _bar_columns(width, head, rows)
    table = _grid(head, _axis(window, columns))
    for row, span in zip(rows, timeline.phases, strict=True):
        first = min(_column(span.began_s, window, columns), columns - 1)
        last = max(first + 1, _column(span.ended_s, window, columns))
        table.add_row(*row, Text(" " * first).append("=" * (last - first), style=times.phase_colour(span.name)))
    return table


def _rank_table(lanes: Lanes, marks: tuple[times.FaultMark, ...], width: int) -> Table:
    window = times.window_of(lanes)
    names = _phase_names(lanes)
    new = times.newcomers(lanes)
    shown = rows_to_show(lanes)
    rest = [rank for rank in lanes if rank not in shown]
    rows = [(f"{rank}{' new' if rank in new else ''}", *_durations(lanes[rank], names)) for rank in shown]
    if rest:
        rows.append((f"{len(rest)} more", *(_slowest(lanes, rest, name) for name in names)))
    head = ("rank", *names)
    columns = _bar_columns(width, head, rows)
    bars = [_bar(lanes[rank], _faults(marks, rank, window), window, columns) for rank in shown]
    if rest:
        bars.append(Text(f"at most, {numbers_text(rest)}"[:columns], style="dim"))
    table = _grid(head, _axis(window, columns))
    for row, bar in zip(rows, bars, strict=True):
        table.add_row(*row, bar)
    return table


def _faults(marks: tuple[times.FaultMark, ...], rank: int, window: Window) -> list[float]:
    """Return when the rank was reported within the window. What came before it is the cause, and is shown as text."""
    began_s, ended_s = window
    return [mark.at_s for mark in marks if mark.rank == rank and began_s < mark.at_s < ended_s]


def _bar(spans: tuple[times.Span, ...], faults: list[float], window: Window, columns: int) -> Text:
    cells = bar_cells(spans, window, columns)
    for at_s in faults:
        cells[min(columns - 1, _column(at_s, window, columns))] = Cell(times.FAULT_LETTER, times.FAULT_COLOUR)
    text = Text()
    for cell in cells:
        if cell is None:
            text.append(" ")
        else:
            ink = "bold white" if cell.letter == times.FAULT_LETTER else "black"
            text.append(cell.letter, style=f"{ink} on {cell.colour}")
    return text


def _phase_names(lanes: Lanes) -> list[str]:
    present = {span.name for lane in lanes.values() for span in lane}
    known = [name for name in times.RANK_PHASES if name in present]
    return known + sorted(present.difference(times.RANK_PHASES))


def _durations(spans: tuple[times.Span, ...], names: list[str]) -> tuple[str, ...]:
    took = {span.name: span.length_s for span in spans}
    return tuple(duration_text(took[name]) if name in took else ABSENT for name in names)


def _slowest(lanes: Lanes, ranks: list[int], name: str) -> str:
    lengths = [span.length_s for rank in ranks for span in lanes[rank] if span.name == name]
    return duration_text(max(lengths, default=None))


def _bar_columns(width: int, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> int:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return max(NARROWEST_BAR, width - sum(widths) - COLUMN_GAP * len(widths))


def _axis(window: Window, columns: int) -> str:
    began, ended = (duration_text(end_s) if end_s else "0" for end_s in window)
    return f"{began}{' ' * max(1, columns - len(began) - len(ended))}{ended}"


def _grid(head: tuple[str, ...], axis: str) -> Table:
    table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0), pad_edge=False, header_style="dim")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    table.add_column(axis, no_wrap=True, overflow="crop")
    return table
