"""Measures what a fault costs a job on Ray: the longest time in which no rank makes a step. Prints a table.

MIDSTEP_REQUIRE_RAY=1 $(python -m tests.ray.environment)/python -m tests.ray.measure [RUNS]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..machines.conftest import REPOSITORY
from ..machines.machines import Machines
from .cluster import RayCluster
from .conftest import MACHINES
from .job import RayJob

STEPS = 1_000_000  # more than are made
STEP_S = 0.02
BEFORE, AFTER = 30, 60  # steps of a rank
LOOK_S = 0.005
LIMIT_S = 300.0
# Room for all runs in one job.
MANY = {
    "ladder": [{"rung": rung, "budget": {"per_job": 100}} for rung in ("retry_step", "recover_in_place", "recover")]
    + [{"rung": "stop"}]
}

Fault = Callable[[RayJob], None]


def _kill_rank(job: RayJob) -> None:
    job.kill_rank(1)


def _kill_actor(job: RayJob) -> None:
    job.kill_actor_of(job.answer().ranks[1].node)


def _kill_raylet(job: RayJob) -> None:
    job.kill_raylet_of(job.answer().ranks[1].node)


def _power_off(job: RayJob) -> None:
    job.machine_of(1).power_off()


def _kill_controller(job: RayJob) -> None:
    job.kill_controller_actor()


FAULTS: dict[str, Fault] = {
    "kill -9 of a rank": _kill_rank,
    "kill -9 of the process of a node's actor": _kill_actor,
    "kill -9 of a raylet": _kill_raylet,
    "machine off": _power_off,
    "kill -9 of the process of the controller's actor": _kill_controller,
}


def main(runs: int) -> None:
    """Make a cluster, and measure each fault so many times on it."""
    with tempfile.TemporaryDirectory() as folder, Machines(MACHINES, (REPOSITORY, Path(folder))) as machines:
        measure(RayCluster(machines), Path(folder), runs)


def measure(cluster: RayCluster, folder: Path, runs: int) -> None:
    """Print the medians."""
    print("| fault | longest pause of training | each run |\n| --- | --- | --- |", flush=True)
    for number, (name, cause) in enumerate(FAULTS.items()):
        cluster.mend()
        job = RayJob(cluster, folder / str(number), steps=STEPS, step_s=STEP_S, policy=MANY)
        paused = []
        for run in range(1, runs + 1):
            job.until_steps(BEFORE * run)
            job.until_there_is_a_spare()
            paused.append(longest_pause(job, cause))
            cluster.mend()
        every = ", ".join(f"{pause_s:.2f}" for pause_s in paused)
        print(f"| {name} | {statistics.median(paused):.2f} s | {every} |", flush=True)
        job.stop()
        job.close()


def longest_pause(job: RayJob, cause: Fault) -> float:
    """Cause a fault, and return the longest time without a step until all ranks have made some more."""
    files = [job.records / f"steps.{rank}" for rank in range(job.ranks)]
    sizes = [file.stat().st_size for file in files]
    enough = [
        size + size * AFTER // max(1, len(file.read_bytes().splitlines()))
        for file, size in zip(files, sizes, strict=True)
    ]
    began_s = last_s = time.monotonic()
    longest_s = 0.0
    cause(job)
    caused_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        assert now_s - began_s < LIMIT_S, job.said()
        grown = [file.stat().st_size for file in files]
        if min(now - before for now, before in zip(grown, sizes, strict=True)) > 0:
            sizes, last_s = grown, now_s
        longest_s = max(longest_s, now_s - max(last_s, caused_s))
        if all(size >= limit for size, limit in zip(grown, enough, strict=True)) and longest_s > 0:
            return longest_s
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
