"""Hunts every mutant by exploration and by the campaign: `make test SUITE=mutants`.

python -m tests.mutants [--write] [--seeds N] [NAME...]     --write: into docs/simulator.md
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

from .hunts import MOST_SEEDS, MUTANTS, in_small_worlds, in_the_campaign
from .table import Row, write


def hunted(number: int, most_seeds: int) -> Row:
    """Hunt one mutant in both ways."""
    mutant = MUTANTS[number]
    return Row(in_small_worlds(mutant), in_the_campaign(mutant, most_seeds))


def main() -> int:
    """Hunt them, one on each core; the exit status is 1 when one lives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a mutant's name; all without")
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS, help="how many random jobs each may take")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/simulator.md, when all were hunted"
    )
    options = parser.parse_args()
    chosen = [n for n, m in enumerate(MUTANTS) if not options.names or any(name in m.name for name in options.names)]
    rows: dict[str, Row] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        hunts = {pool.submit(hunted, number, options.seeds): MUTANTS[number].name for number in chosen}
        for done in as_completed(hunts):
            row = rows[hunts[done]] = done.result()
            seen = [f"{each.by} after {each.after:,}" for each in row if each is not None]
            print(f"{hunts[done]}: {row.by}: {'; '.join(seen)}", flush=True)
    if options.write and len(rows) == len(MUTANTS):
        write(rows)
    lived = [name for name, row in rows.items() if row.by == "nothing"]
    print(f"{len(rows) - len(lived)} of {len(rows)} mutants are caught{': alive are ' * bool(lived)}{', '.join(lived)}")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
