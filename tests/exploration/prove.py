"""Explores the large bounds, with progress, and goes on where it was stopped: `make test SUITE=prove`.

python tests/exploration/prove.py [--folder FOLDER] [NAME...]     NAME: part of a bound's name
"""

import argparse
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from .bounds import LARGE, SMALL
from .explore import Exploration, RuleBroken

PORTION = 20_000  # moves between two reports
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
    """Explore the bounds, one on each core; the exit status is 1 when a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; all without")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where frontiers are kept; remove it to begin again"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bounds = (*SMALL, *LARGE)
    chosen = [n for n, b in enumerate(bounds) if not options.names or any(name in b.name for name in options.names)]
    try:
        return 0 if all(explore_all(chosen, options.folder)) else 1
    except KeyboardInterrupt:
        print(f"stopped: {options.folder} has the frontiers, the same command goes on from there", file=sys.stderr)
        return 130


def explore_all(numbers: list[int], folder: Path) -> list[bool]:
    """Explore bounds, each in a process of its own; print how each ended, and return whether its rules held."""
    kept = []
    ended_by_ctrl_c = (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(os.cpu_count(), initializer=signal.signal, initargs=ended_by_ctrl_c) as pool:
        for done in as_completed([pool.submit(explore, number, folder) for number in numbers]):
            told, ok = done.result()
            print(told, flush=True)
            kept.append(ok)
    return kept


if __name__ == "__main__":
    sys.exit(main())
