"""Explores the large bounds, with progress, and goes on where it was stopped: `make prove`.

python tests/exploration/prove.py [--folder FOLDER] [NAME...]     NAME: part of a bound's name
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from .bounds import LARGE, SMALL
from .explore import Exploration, RuleBroken

PORTION = 200_000  # moves between two reports
FOLDER = Path("out/prove")


def explore(number: int, folder: Path) -> tuple[str, bool]:
    """Explore one bound to its end, with a line and a saved frontier after each portion; False: a rule is broken."""
    bound = (*SMALL, *LARGE)[number]
    exploration = Exploration(bound.name, bound.start())
    saved = folder / f"{number}.frontier"
    if saved.exists():
        exploration.restore(saved)
    began_s = time.monotonic()
    try:
        while not exploration.run(most_moves=PORTION):
            exploration.save(saved)
            print(f"{bound.name}: {exploration.states} states so far, {len(exploration.levels)} deep", flush=True)
    except RuleBroken as broken:
        return f"{bound.name}: {broken}", False
    exploration.save(saved)
    took_s = time.monotonic() - began_s
    ends = ", ".join(f"{count} with exit code {code}" for code, count in sorted(exploration.ends.items()))
    whole = f"all {exploration.states} states, {exploration.moves} moves, {took_s:.0f} s now"
    return f"{bound.name}: {whole}, the longest way {exploration.deepest}; ends: {ends}", True


def main() -> int:
    """Explore the bounds, two at a time; the exit status is 1 when a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; all without")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where frontiers are kept; remove it to begin anew")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bounds = (*SMALL, *LARGE)
    chosen = [n for n, b in enumerate(bounds) if not options.names or any(name in b.name for name in options.names)]
    kept = True
    with ProcessPoolExecutor(2) as pool:
        for done in as_completed([pool.submit(explore, number, options.folder) for number in chosen]):
            told, ok = done.result()
            print(told, flush=True)
            kept = kept and ok
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
