"""A comparison for the terminal, and the history for docs/benchmarks.md."""

import itertools
from collections.abc import Sequence

from .comparison import Movement, Verdict, compare
from .record import Figure, Record

SIGNS = {Verdict.WORSE: " ↓", Verdict.BETTER: " ↑"}


def shown(figure: Figure | None) -> str:
    """Return a figure as `median (least-greatest) unit`."""
    if figure is None:
        return ""
    digits = 2 if figure.median >= 0.1 else 4
    values = (f"{value:.{digits}f}" for value in (figure.median, figure.least, figure.greatest))
    return "{} ({}-{}) {}".format(*values, figure.unit).strip()


def lines(movements: Sequence[Movement]) -> list[str]:
    """Return a line for each figure: before, now, ratio, verdict."""
    rows = [
        (
            movement.name,
            shown(movement.old),
            shown(movement.new),
            f"{movement.ratio:.2f}" if movement.ratio else "",
            movement.verdict.value,
        )
        for movement in movements
    ]
    heads = ("figure", "last kept", "now", "ratio", "")
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]


def history(records: Sequence[Record]) -> str:
    """Return all kept records as a table, a column for each. An arrow: beyond the noise of this and the one before."""
    if not records:
        return "Nothing has been kept so far.\n"
    names = dict.fromkeys(figure.name for record in records for figure in record.figures)
    heads = [f"{record.day}, `{record.commit}`" for record in records]
    table = [f"| | {' | '.join(heads)} |", "| --- |" + " --- |" * len(records)]
    moved = [
        {},
        *({each.name: each.verdict for each in compare(*pair)} for pair in itertools.pairwise(records)),
    ]
    for name in names:
        cells = []
        for record, verdicts in zip(records, moved, strict=True):
            found = next((figure for figure in record.figures if figure.name == name), None)
            cells.append(shown(found) + (SIGNS.get(verdicts.get(name, Verdict.NEW), "") if found else ""))
        table.append(f"| {name} | {' | '.join(cells)} |")
    table.append(f"| foreign cores | {' | '.join(f'{record.foreign_cores:.2f}' for record in records)} |")
    return "\n".join(table) + "\n"
