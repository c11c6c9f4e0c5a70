"""The table of mutants in `docs/simulator.md`: written by `python -m tests.mutants --write`, read by a test."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .hunts import MUTANTS, Caught

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"
BEGIN, END = "<!-- mutants: begin -->\n", "<!-- mutants: end -->"
HEAD = "| mutant | caught by | exploration: what breaks, in which world | moves | campaign: what breaks | seeds |\n"
NOT_CAUGHT = "-"


class Row(NamedTuple):
    """What caught a mutant: the exploration, the campaign, or both."""

    explored: Caught | None
    played: Caught | None

    @property
    def by(self) -> str:
        """Return the word for it."""
        words = {(True, True): "both", (True, False): "exploration", (False, True): "campaign"}
        return words.get((self.explored is not None, self.played is not None), "nothing")


def rendered(rows: Mapping[str, Row]) -> str:
    """Return the table, in the order of the mutants."""
    lines = [HEAD, "| --- | --- | --- | --- | --- | --- |\n"]
    for mutant in MUTANTS:
        row = rows[mutant.name]
        there = (NOT_CAUGHT, NOT_CAUGHT) if row.explored is None else (_where(row.explored), f"{row.explored.after:,}")
        here = (NOT_CAUGHT, NOT_CAUGHT) if row.played is None else (_plain(row.played.by), f"{row.played.after:,}")
        lines.append(f"| {' | '.join((mutant.name, row.by, *there, *here))} |\n")
    counts = {word: sum(row.by == word for row in rows.values()) for word in ("both", "exploration", "campaign")}
    explored = counts["both"] + counts["exploration"]
    lines.append(
        f"\n{explored} of {len(rows)} are caught by the exploration, {counts['both'] + counts['campaign']} by the "
        f"campaign, {counts['both']} by both.\n"
    )
    return "".join(lines)


def _where(caught: Caught) -> str:
    return f"{_plain(caught.by)} ({caught.bound})"


def _plain(rule: str) -> str:
    """Return the name of a rule without its number."""
    return rule.lstrip("0123456789 ") if rule[:1].isdigit() else f"`{rule}`" if rule[:1].isupper() else rule


def written() -> str:
    """Return the table as it stands in the docs."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    return rest.partition(END)[0]


def write(rows: Mapping[str, Row]) -> None:
    """Put the table into the docs."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}{rendered(rows)}{end}{after}")


def told() -> dict[str, tuple[str, str, int]]:
    """Return what the docs say of each mutant: caught by what, in which explored world, after how many moves."""
    said = {}
    for line in written().splitlines()[2:]:
        if line.startswith("|"):
            name, by, where, moves, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            world = where.rpartition(" (")[2].rstrip(")")
            said[name] = (by, world, 0 if moves == NOT_CAUGHT else int(moves.replace(",", "")))
    return said
