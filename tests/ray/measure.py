"""Measures what a loss costs a job on Ray: the longest time in which not every rank makes a step. Prints a table.

MIDSTEP_REQUIRE_RAY=1 $(python -m tests.ray.environment)/python -m tests.ray.measure [RUNS [WORDS OF A LOSS]]
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from midstep.protocol.incidents import JobStatus

from ..machines.conftest import REPOSITORY
from ..machines.machines import Machines
from ..machines.pauses import Pauses, until_more
from .cluster import RayCluster
from .conftest import MACHINES
from .job import RayJob

STEPS = 1_000_000  # more than are made
STEP_S = 0.02
BEFORE, AFTER = 50, 50  # steps of a rank, before a loss and after what followed
SEEN = 5
WARM_S = 8.0  # for the spare to have its processes ready, torch imported
# Room for all runs in one job.
MANY = {
    "ladder": [{"rung": rung, "budget": {"per_job": 100}} for rung in ("retry_step", "recover_in_place", "recover")]
    + [{"rung": "stop"}]
}

Loss = Callable[[RayJob, int], None]
Over = Callable[[JobStatus, JobStatus, int], bool]


def _kill_rank(job: RayJob, rank: int) -> None:
    job.kill_rank(rank)


def _kill_actor(job: RayJob, rank: int) -> None:
    job.kill_actor_of(job.answer().ranks[rank].node)


def _kill_raylet(job: RayJob, rank: int) -> None:
    job.kill_raylet_of(job.answer().ranks[rank].node)


def _power_off(job: RayJob, rank: int) -> None:
    job.machine_of(rank).power_off()


def _kill_controller(job: RayJob, rank: int) -> None:
    job.kill_controller_actor()


def _drain(job: RayJob, rank: int) -> None:
    job.cluster.drain(job.machine_of(rank))


def _replaced(before: JobStatus, now: JobStatus, rank: int) -> bool:
    return now.phase == "running" and now.ranks[rank].incarnation > before.ranks[rank].incarnation


def _succeeded(before: JobStatus, now: JobStatus, rank: int) -> bool:
    return now.phase == "running" and now.term > before.term


LOSSES: dict[str, tuple[Loss, Over]] = {
    "`kill -9` of a rank": (_kill_rank, _replaced),
    "`kill -9` of the process of a node's actor": (_kill_actor, _replaced),
    "`kill -9` of a raylet": (_kill_raylet, _replaced),
    "a machine powered off": (_power_off, _replaced),
    "`kill -9` of the process of the controller's actor": (_kill_controller, _succeeded),
    "a machine drained": (_drain, _replaced),
}


def main(runs: int, words: str) -> None:
    """Make a cluster, and measure each loss so many times on it; only those whose names have the words."""
    with tempfile.TemporaryDirectory() as folder, Machines(MACHINES, (REPOSITORY, Path(folder))) as machines:
        cluster = RayCluster(machines)
        print("| lost | longest pause | each run |\n| --- | --- | --- |", flush=True)
        for number, name in enumerate(name for name in LOSSES if words in name):
            paused = measured(cluster, Path(folder) / str(number), runs, *LOSSES[name])
            every = ", ".join(f"{pause_s:.2f}" for pause_s in paused)
            print(f"| {name} | {statistics.median(paused):.2f} s | {every} |", flush=True)
        print(f"load of the last minutes: {', '.join(f'{load:.1f}' for load in os.getloadavg())}", flush=True)


def measured(cluster: RayCluster, folder: Path, runs: int, cause: Loss, over: Over) -> list[float]:
    """Return the longest pause of each run, all of one job that gets its spare back before the next."""
    cluster.mend()
    job = RayJob(cluster, folder, steps=STEPS, step_s=STEP_S, policy=MANY)
    try:
        paused = []
        for _ in range(runs):
            job.until_there_is_a_spare()
            job.until(lambda now: now.committed > 0, "the first step")
            time.sleep(WARM_S)
            _until_more(job, BEFORE)
            paused.append(longest_pause(job, cause, over))
            cluster.mend()
        job.stop()
        return paused
    finally:
        job.close()


def longest_pause(job: RayJob, cause: Loss, over: Over) -> float:
    """Cause a loss, and return the longest time until each rank has made a step more, until some steps after it."""
    before = job.answer()
    controller = job.machine_of_controller()
    # Not where the controller is: that is a loss of its own.
    rank = next(each.rank for each in before.ranks if job.machine_named(each.node) is not controller)
    leaving = job.machine_of(rank) if cause is _drain else None
    watching = Pauses(job.records, job.ranks)
    watching.start()
    _until_more(job, SEEN)  # a pause has a step before it
    began_s = time.time()
    cause(job, rank)
    job.until(lambda now: over(before, now, rank), "what follows the loss")
    _until_more(job, AFTER)
    paused_s = watching.stop(began_s)
    if leaving is not None:
        leaving.power_off()  # Ray takes no drained raylet back
    return paused_s


def _until_more(job: RayJob, steps: int) -> None:
    until_more(job.records, job.ranks, steps, job.said)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3, sys.argv[2] if len(sys.argv) > 2 else "")
