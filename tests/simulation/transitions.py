"""Which transitions of the job's phase happen in simulated jobs, and a job for each: a recording.

    python tests/simulation/transitions.py [--seeds 1000]     play so many jobs with their faults in each phase in turn,
                                                              after those that are recorded

Run it when a change of the machine or of the simulation has changed what happens: it rewrites `transitions.txt`, from
which the test of `controller/recovery/transitions.py` plays one job for each transition, and says what it has found
that is not claimed, and what is claimed that it has not found.
"""

import argparse
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.transitions import LEADS_TO
from midstep.simulation.campaign import Reached, run_seeds

RECORDING = Path(__file__).with_name("transitions.txt")
CHUNK = 10


class Job(NamedTuple):
    """A simulated job: its seed, and the phase that most faults wait for."""

    seed: int
    focus: Phase | None


def reached(job: Job) -> frozenset[Reached]:
    """Return the transitions that happen in a job; those that stay in the phase are none."""
    tally = run_seeds([job.seed], job.focus)
    if tally.broken:
        print(f"{job} breaks {tally.broken}", flush=True)
    return frozenset(each for each in tally.reached if each[0] is not each[2])


def claimed() -> frozenset[Reached]:
    """Return the transitions that the product says there are."""
    return frozenset((before, event.__name__, after) for (before, event), to in LEADS_TO.items() for after in to)


def recorded() -> list[Job]:
    """Return the jobs of the recording."""
    words = (line.split() for line in RECORDING.read_text().splitlines())
    return [Job(int(seed), None if focus == "any" else Phase(focus)) for seed, focus in words]


def _play(jobs: list[Job]) -> list[tuple[Job, frozenset[Reached]]]:
    return [(job, reached(job)) for job in jobs]


def play(seeds: int, workers: int) -> Iterator[tuple[Job, frozenset[Reached]]]:
    """Play the jobs of the recording, and `seeds` jobs for each phase that faults can wait for."""
    jobs = recorded() + [Job(seed, focus) for seed in range(seeds) for focus in (None, *Phase)]
    chunks = [jobs[first : first + CHUNK] for first in range(0, len(jobs), CHUNK)]
    with ProcessPoolExecutor(workers, initializer=gc.freeze) as pool:
        for played in pool.map(_play, chunks):
            yield from played


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    useful: dict[Job, frozenset[Reached]] = {}
    found: set[Reached] = set()
    for job, transitions in play(options.seeds, options.workers):
        if transitions - found:
            found |= transitions
            useful[job] = transitions
    missing, chosen = set(found), []
    while missing:
        best = max(useful, key=lambda job: len(useful[job] & missing))
        missing -= useful[best]
        chosen.append(best)
    RECORDING.write_text("".join(f"{job.seed} {job.focus or 'any'}\n" for job in chosen))
    print(f"{len(found)} transitions, in {len(chosen)} jobs")
    for what, those in (("not claimed", found - claimed()), ("not found", claimed() - found)):
        for before, event, after in sorted(those):
            print(f"{what}: {before} {event} {after}")


if __name__ == "__main__":
    main()
