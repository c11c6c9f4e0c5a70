"""A recording of the machine's decisions in every job of many seeds, and what has changed against it.

    python tests/simulation/decisions.py record FILE [--seeds 0:10000]   before a change
    python tests/simulation/decisions.py compare FILE                    after it: the same seeds, 1 if one differs
    python tests/simulation/decisions.py show SEED                       all that is compared of one job, to be diffed

Every second seed puts its faults into one phase of the job, the phases in turn, so that all rules get their share.
"""

import argparse
import gc
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from midstep.controller.recovery.state import Phase
from midstep.testing.invariants import InvariantBroken
from midstep.testing.simulation.world import SimulatedWorld

CHUNK = 20  # seeds that a worker does in one go
SHOWN = 20  # seeds that differ, of which the number is said
_PHASES = tuple(Phase)


class Line(NamedTuple):
    """One job: digests of what was decided and how it ended, of all that was sent, and of the incidents' records."""

    seed: int
    decisions: str
    commands: str
    records: str


def told(seed: int) -> tuple[list[str], list[str], list[str]]:
    """Play a seed; return what was decided, what was sent, and what was recorded, each as lines of text."""
    world = SimulatedWorld(seed, focus=None if seed % 2 == 0 else _PHASES[seed // 2 % len(_PHASES)])
    broken = []
    try:
        world.run()
    except InvariantBroken as error:
        broken = [f"{error.invariant}: {error.what}"]
    incidents = world.machine.incidents
    decided = [
        f"{each.number} {each.outcome} {each.ended_reason!r} {each.restore} {each.resumed_step} {decision}"
        for each in incidents
        for decision in each.decisions or ("no decision",)
    ]
    sent = [f"{number} {action}" for number, actions in enumerate(world.controller.done) for action in actions]
    return broken + decided, sent, [str(each) for each in incidents]


def digests(seeds: Iterable[int]) -> list[Line]:
    """Play seeds one after the other, here."""
    gc.disable()  # as a campaign does: a job is full of cycles, and short
    lines = [Line(seed, *map(_digest, told(seed))) for seed in seeds]
    gc.enable()
    gc.collect()
    return lines


def _digest(text: list[str]) -> str:
    return hashlib.blake2b("\n".join(text).encode(), digest_size=8).hexdigest()


def play(seeds: Iterable[int], workers: int) -> Iterator[Line]:
    """Play seeds on several cores, in order."""
    waiting = iter(seeds)
    chunks = iter(lambda: list(islice(waiting, CHUNK)), [])
    with ProcessPoolExecutor(workers, initializer=gc.freeze) as pool:
        for lines in pool.map(digests, chunks):
            yield from lines


def record(file: Path, seeds: Iterable[int], workers: int) -> int:
    """Write a line for each seed, as soon as it is known."""
    with file.open("w", encoding="utf-8") as out:
        for line in play(seeds, workers):
            print(*line, file=out, flush=True)
    return 0


def compare(file: Path, most: int, workers: int) -> int:
    """Play the seeds of a recording, and say which differ, and in what."""
    texts = file.read_text(encoding="utf-8").splitlines()[:most]
    before = [Line(int(seed), *rest) for seed, *rest in map(str.split, texts)]
    other = 0
    for old, new in zip(before, play([line.seed for line in before], workers), strict=True):
        changed = [name for name in ("decisions", "commands", "records") if getattr(old, name) != getattr(new, name)]
        other += bool(changed)
        if changed and other <= SHOWN:
            print(f"seed {new.seed}: other {', '.join(changed)}", flush=True)
    print(f"{other} of {len(before)} seeds differ")
    return 1 if other else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare", "show"))
    parser.add_argument("what", help="the recording; of `show`, a seed")
    parser.add_argument("--seeds", default="0:10000", metavar="FIRST:END", help="which to record")
    parser.add_argument("--most", type=int, default=sys.maxsize, metavar="N", help="compare the first N only")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.command == "show":
        print("\n".join(line for part in told(int(options.what)) for line in part))
        return 0
    if options.command == "compare":
        return compare(Path(options.what), options.most, options.workers)
    first, _, end = options.seeds.partition(":")
    return record(Path(options.what), range(int(first), int(end)), options.workers)


if __name__ == "__main__":
    raise SystemExit(main())
