"""Jobs in which everything happens that the tables of the machine claim: a recording of their seeds.

    python tests/simulation/recording.py [--seeds 1000]       play those that are recorded, and then so many jobs with
                                                              their faults in each phase in turn

Run it when a change of the machine or of the simulation has changed what happens. It rewrites `recording.txt`, from
which the tests play, and says what it has found that is not claimed, and what is claimed that it has not found.
"""

import argparse
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from midstep.controller.recovery import world
from midstep.controller.recovery.events import ControlRequested, PolicyApplied
from midstep.controller.recovery.machine import TABLE
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NEXT, RankEvent, RankState
from midstep.protocol.messages import ActionEnded, NodeChecked, NodeEnrolled
from midstep.testing.simulation.campaign import run_seeds
from midstep.testing.transitions import LEADS_TO

RECORDING = Path(__file__).with_name("recording.txt")
CHUNK = 10


class Job(NamedTuple):
    """A simulated job: its seed, and the phase that most faults wait for."""

    seed: int
    focus: Phase | None


class Taken(NamedTuple):
    """An event was taken in a phase (`controller/recovery/machine.py`)."""

    phase: Phase
    event: str


class Led(NamedTuple):
    """An event led from one phase to another (`testing/transitions.py`)."""

    before: Phase
    event: str
    after: Phase


class Moved(NamedTuple):
    """An event took a rank on (`controller/recovery/world.py`)."""

    state: RankState
    event: RankEvent


Happened = Taken | Led | Moved

# Simulated nodes need no admission, and are not checked; operators' controls are played by hand (`boundary.py`), a
# policy that changes in tests/unit/test_policy_changes.py, what ranks answer to one in tests/unit/test_held_actions.py.
NOT_PLAYED = frozenset({NodeEnrolled, NodeChecked, ControlRequested, PolicyApplied, ActionEnded})
_ROWS = frozenset(Taken(phase, event.__name__) for phase, event in TABLE if event not in NOT_PLAYED)


def happens(job: Job) -> frozenset[Happened]:
    """Return all that happens in a job. Raises AssertionError when an invariant is broken."""
    found: set[Happened] = set()

    class Watched(dict[tuple[RankState, RankEvent], RankState]):
        def get(self, move: tuple[RankState, RankEvent], default: Any = None) -> Any:
            found.add(Moved(*move))
            return super().get(move, default)

    with patch.object(world, "NEXT", Watched(NEXT)):
        tally = run_seeds([job.seed], job.focus)
    assert not tally.broken, f"{job}: {tally.broken}"
    for before, event, later in tally.reached:
        found |= {Taken(before, event)} & _ROWS
        found |= {Led(before, event, later)} if later is not before else set()
    return frozenset(found)


def claimed() -> frozenset[Happened]:
    """Return all that the tables say there is."""
    led = (Led(before, event.__name__, later) for (before, event), to in LEADS_TO.items() for later in to)
    moved = (Moved(state, event) for state, event in NEXT)
    return frozenset((*_ROWS, *led, *moved))


def recorded() -> list[Job]:
    """Return the jobs of the recording."""
    words = (line.split() for line in RECORDING.read_text().splitlines())
    return [Job(int(seed), None if focus == "any" else Phase(focus)) for seed, focus in words]


def _play(jobs: list[Job]) -> list[tuple[Job, frozenset[Happened]]]:
    return [(job, happens(job)) for job in jobs]


def play(seeds: int, workers: int) -> Iterator[tuple[Job, frozenset[Happened]]]:
    """Play the jobs of the recording, and `seeds` jobs for each phase that faults can wait for."""
    jobs = recorded() + [Job(seed, focus) for seed in range(seeds) for focus in (None, *Phase)]
    chunks = [jobs[first : first + CHUNK] for first in range(0, len(jobs), CHUNK)]
    with ProcessPoolExecutor(workers, initializer=gc.freeze) as pool:
        for played in pool.map(_play, chunks):
            yield from played


def fewest(useful: dict[Job, frozenset[Happened]]) -> list[Job]:
    """Return a few of the jobs, in which as much happens as in all of them."""
    missing, chosen = set().union(*useful.values()), []
    while missing:
        best = max(useful, key=lambda job: len(useful[job] & missing))
        missing -= useful[best]
        chosen.append(best)
    return chosen


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    useful: dict[Job, frozenset[Happened]] = {}
    found: set[Happened] = set()
    for job, happened in play(options.seeds, options.workers):
        if happened - found:
            found |= happened
            useful[job] = happened
    chosen = fewest(useful)
    RECORDING.write_text("".join(f"{job.seed} {job.focus or 'any'}\n" for job in chosen))
    print(f"{len(found)} of {len(claimed())} things happen, in {len(chosen)} jobs")
    for what, those in (("not claimed", found - claimed()), ("not found", claimed() - found)):
        for line in sorted(" ".join(each) for each in those):
            print(f"{what}: {line}")


if __name__ == "__main__":
    main()
