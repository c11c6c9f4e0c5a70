"""Hunts every mutant by exploration and by the campaign: `make test SUITE=mutants`.

python -m tests.mutants [--write] [--seeds N] [NAME...]     --write: into docs/simulator.md

What was found is kept in `out/mutants`, so the same command goes on where it was stopped, as long as no file that
matters has changed.
"""

import argparse
import hashlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from .hunts import MOST_SEEDS, MUTANTS, in_small_worlds, in_the_campaign
from .table import Row, write

ROOT = Path(__file__).parents[2]
FOLDER = Path("out/mutants")
MATTERS = ("controller", "policies", "processor", "protocol", "testing", "tests/exploration", "tests/mutants")


class Kept:
    """The rows that were found with the files as they are, kept in a file that bears their hash."""

    def __init__(self, folder: Path, most_seeds: int) -> None:
        """`folder`: made where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(path for name in MATTERS for path in (ROOT / name).rglob("*.py"))
        content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        self._file = folder / f"{content[:16]}-{most_seeds}.json"
        self.rows: dict[str, Row] = {}
        if self._file.exists():
            self.rows = msgspec.json.decode(self._file.read_bytes(), type=dict[str, Row])

    def add(self, name: str, row: Row) -> None:
        """Keep one more."""
        self.rows[name] = row
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self.rows))
        new.rename(self._file)


def hunted(number: int, most_seeds: int) -> Row:
    """Hunt one mutant in both ways."""
    mutant = MUTANTS[number]
    return Row(in_small_worlds(mutant), in_the_campaign(mutant, most_seeds))


def main() -> int:
    """Hunt them, one on each core; the exit status is 1 when one lives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a mutant's name; all without")
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS, help="how many random jobs each may take")
    parser.add_argument("--write", action="store_true", help="put the rows into the table of docs/simulator.md")
    options = parser.parse_args()
    chosen = [n for n, m in enumerate(MUTANTS) if not options.names or any(name in m.name for name in options.names)]
    kept = Kept(FOLDER, options.seeds)
    rows = {MUTANTS[n].name: kept.rows[MUTANTS[n].name] for n in chosen if MUTANTS[n].name in kept.rows}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        hunts = {
            pool.submit(hunted, number, options.seeds): MUTANTS[number].name
            for number in chosen
            if MUTANTS[number].name not in rows
        }
        try:
            for done in as_completed(hunts):
                row = rows[hunts[done]] = done.result()
                kept.add(hunts[done], row)
                seen = [f"{each.by} after {each.after:,}" for each in row if each is not None]
                print(f"{hunts[done]}: {row.by}: {'; '.join(seen)}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # those under way end first
            return 130
    if options.write:
        write(rows)
    lived = [name for name, row in rows.items() if row.by == "nothing"]
    print(f"{len(rows) - len(lived)} of {len(rows)} mutants are caught{': alive are ' * bool(lived)}{', '.join(lived)}")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
