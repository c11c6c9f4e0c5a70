"""Measures what a killed rank costs on one machine and on two: how long not every rank makes a step. Prints a table.

python -m tests.machines.measure [RUNS]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from .conftest import REPOSITORY
from .job import Job
from .machines import Machines
from .network import Quality
from .pauses import Pauses, until_more

STEPS = 1_000_000  # more than are made
STEP_S = 0.02
BEFORE, AFTER, SEEN = 50, 50, 5  # steps of a rank
WARM_S = 5.0  # for the process that waits for the next loss to be ready
RANKS = 2
# Room for all runs in one job.
BUDGET = {"per_job": 100, "per_rank": 100, "per_node": 100}
MANY = {"ladder": [{"rung": "recover_in_place", "budget": BUDGET}, {"rung": "stop"}]}


class Placement(msgspec.Struct, frozen=True):
    """On which machines the two ranks are, beside the controller's, and what each cable is like."""

    on: tuple[int, ...]
    cable: Quality | None = None


PLACEMENTS = {
    "one machine": Placement((1,)),
    "two machines": Placement((1, 2)),
    "two machines, 10 ms from one to the other": Placement((1, 2), Quality(delay_s=0.005)),
}


def main(runs: int) -> None:
    """Measure each placement so many times, by turns, on new machines each time."""
    paused: dict[str, list[float]] = {name: [] for name in PLACEMENTS}
    steps: dict[str, list[float]] = {name: [] for name in PLACEMENTS}
    for _ in range(2):  # by turns: the computer is not the same all the time
        for name, placement in PLACEMENTS.items():
            with tempfile.TemporaryDirectory() as folder, Machines(3, (REPOSITORY, Path(folder))) as machines:
                pauses, step_s = measured(machines, Path(folder), runs, placement)
            paused[name] += pauses
            steps[name].append(step_s)
    print("| ranks on | longest pause | a step | beyond a step |\n| --- | --- | --- | --- |")
    for name, pauses in paused.items():
        step_s, pause_s = statistics.median(steps[name]), statistics.median(pauses)
        every = f"{min(pauses):.2f} to {max(pauses):.2f}"
        print(f"| {name} | {pause_s:.2f} s ({every}) | {step_s:.3f} s | {pause_s - step_s:.2f} s |")


def measured(machines: Machines, folder: Path, runs: int, placement: Placement) -> tuple[list[float], float]:
    """Return the longest pause after each kill of one job, and how long its steps take."""
    nodes = len(placement.on)
    job = Job(
        machines,
        folder,
        nodes=nodes,
        ranks_per_node=RANKS // nodes,
        steps=STEPS,
        step_s=STEP_S,
        policy=MANY,
        on=placement.on,
    )
    job.until_steps(1)
    if placement.cable is not None:
        for machine in machines:
            machines.network.worsen(machine.number, placement.cable)
    pauses = []
    for _ in range(runs):
        time.sleep(WARM_S)
        until_more(job.records, job.ranks, BEFORE, job.said)
        watching = Pauses(job.records, job.ranks)
        watching.start()
        until_more(job.records, job.ranks, SEEN, job.said)  # a pause has a step before it
        began_s = time.time()
        job.kill_rank(1)
        until_more(job.records, job.ranks, AFTER, job.said)
        pauses.append(watching.stop(began_s))
    began_s = time.monotonic()
    until_more(job.records, job.ranks, BEFORE, job.said)
    step_s = (time.monotonic() - began_s) / BEFORE
    job.stop()
    return pauses, step_s


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
