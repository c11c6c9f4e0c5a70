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


def rendered(rows: Mapping[str, Row], earlier: Mapping[str, str] | None = None) -> str:
    """Return the table, in the order of the mutants. `earlier`: the lines of those that were not hunted again."""
    lines = [HEAD, "| --- | --- | --- | --- | --- | --- |\n"]
    found = []
    for mutant in MUTANTS:
        if mutant.name not in rows:
            lines.append((earlier or {})[mutant.name])
            found.append(lines[-1].split(" | ")[1])
            continue
        row = rows[mutant.name]
        found.append(row.by)
        there = (NOT_CAUGHT, NOT_CAUGHT) if row.explored is None else (_where(row.explored), f"{row.explored.after:,}")
        here = (NOT_CAUGHT, NOT_CAUGHT) if row.played is None else (_plain(row.played.by), f"{row.played.after:,}")
        lines.append(f"| {' | '.join((mutant.name, row.by, *there, *here))} |\n")
    both = found.count("both")
    lines.append(
        f"\n{both + found.count('exploration')} of {len(found)} are caught by the exploration, "
        f"{both + found.count('campaign')} by the campaign, {both} by both.\n"
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
    """Put the table into the docs: the rows of those that were hunted, and those that were there of the others."""
    earlier = {line.strip("| ").partition(" | ")[0]: f"{line}\n" for line in written().splitlines()[2:]}
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}{rendered(rows, earlier)}{end}{after}")


def told() -> dict[str, tuple[str, str, int]]:
    """Return what the docs say of each mutant: caught by what, in which explored world, after how many moves."""
    said = {}
    for line in written().splitlines()[2:]:
        if line.startswith("|"):
            name, by, where, moves, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            world = where.rpartition(" (")[2].rstrip(")")
            said[name] = (by, world, 0 if moves == NOT_CAUGHT else int(moves.replace(",", "")))
    return said
