"""Measures what a loss costs a job in Kubernetes: how long not every rank makes a step. Prints a table.

python -m tests.kubernetes.measure [RUNS [WORDS OF A LOSS]]
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..machines.pauses import Pauses, until_more
from .cluster.cluster import Cluster
from .conftest import NODES
from .managed import ManagedJob, victim

STEPS = 1_000_000  # more than are made
STEP_S = 0.05
BEFORE, AFTER, SEEN = 50, 50, 5  # steps of a rank
WARM_S = 8.0  # for the spare to have its processes ready, torch imported
# Room for all runs in one job.
MANY = {
    "ladder": [{"rung": rung, "budget": {"per_job": 100}} for rung in ("retry_step", "recover_in_place", "recover")]
    + [{"rung": "stop"}]
}


class Loss(msgspec.Struct, frozen=True):
    """What is done to a node of a job that has ranks, and how that is taken back, if it has to be."""

    cause: Callable[[ManagedJob, str], None]
    mend: Callable[[ManagedJob, str], None] = lambda job, host: None
    spares: int = 1


def _kill_rank(job: ManagedJob, node: str) -> None:
    rank = next(each for each in job.current()["ranks"] if each["node"] == node)
    job.execute(node, "kill", "-9", str(rank["pid"]))


def _delete_by_force(job: ManagedJob, node: str) -> None:
    job.cluster.kubectl("delete", "pod", job.pod_of(node), "--grace-period=0", "--force", "--wait=false")


def _delete(job: ManagedJob, node: str) -> None:
    job.cluster.kubectl("delete", "pod", job.pod_of(node), "--wait=false")


def _cordon(job: ManagedJob, node: str) -> None:
    job.cluster.kubectl("cordon", job.cluster.machine_of(job.pod_of(node)).name)


def _uncordon(job: ManagedJob, host: str) -> None:
    job.cluster.kubectl("uncordon", host)


def _power_off(job: ManagedJob, node: str) -> None:
    job.cluster.power_off(job.cluster.machine_of(job.pod_of(node)).number)


def _power_on(job: ManagedJob, host: str) -> None:
    number = next(each.number for each in job.cluster.machines if each.name == host)
    job.cluster.power_on(number)


LOSSES = {
    "`kubectl exec POD -- kill -9` of a rank": Loss(_kill_rank),
    "`kubectl delete pod --force`, with a spare": Loss(_delete_by_force),
    "`kubectl delete pod --force`, without a spare": Loss(_delete_by_force, spares=0),
    "`kubectl delete pod`, with a spare": Loss(_delete),
    "`kubectl cordon`, with a spare and `--watch-nodes`": Loss(_cordon, _uncordon),
    "the host loses its power, with a spare": Loss(_power_off, _power_on),
}


def main(runs: int, words: str) -> None:
    """Make a cluster, and measure each loss so many times on it; only those whose names have the words."""
    with tempfile.TemporaryDirectory() as folder, Cluster(NODES, (Path(folder),)) as cluster:
        print("| lost | longest pause | each run |\n| --- | --- | --- |", flush=True)
        for number, name in enumerate(name for name in LOSSES if words in name):
            paused = measured(cluster, Path(folder) / str(number), f"loss{number}", runs, LOSSES[name])
            every = ", ".join(f"{pause_s:.2f}" for pause_s in paused)
            print(f"| {name} | {statistics.median(paused):.2f} s | {every} |", flush=True)
        print(f"load of the last minutes: {', '.join(f'{load:.1f}' for load in os.getloadavg())}", flush=True)


def measured(cluster: Cluster, root: Path, name: str, runs: int, loss: Loss) -> list[float]:
    """Return the longest pause of each run, all of one job that gets its spare back before the next."""
    job = ManagedJob(
        cluster, root, name, spares=loss.spares, steps=STEPS, step_s=STEP_S, policy=MANY, options=("--watch-nodes",)
    )
    try:
        paused = []
        for _ in range(runs):
            job.until(lambda status: status["phase"] == "running", "the ranks to train")
            if loss.spares:
                job.until_spare()
            time.sleep(WARM_S)
            until_more(job.records, job.ranks, BEFORE, job.said)
            paused.append(longest_pause(job, loss))
        return paused
    finally:
        job.delete()
        cluster.until(lambda: not job.left(), "the job's objects to be gone")


def longest_pause(job: ManagedJob, loss: Loss) -> float:
    """Cause a loss, and return the longest time until each rank has made a step more, until some steps after it."""
    before = job.current()
    node, (rank, *_) = victim(job, before)
    host = job.cluster.machine_of(job.pod_of(node)).name
    watching = Pauses(job.records, job.ranks)
    watching.start()
    until_more(job.records, job.ranks, SEEN, job.said)  # a pause has a step before it
    began_s = time.time()
    loss.cause(job, node)

    def process(status: dict[str, Any]) -> tuple[str, int]:
        return status["ranks"][rank]["node"], status["ranks"][rank]["pid"]

    def over(now: dict[str, Any]) -> bool:
        return now["phase"] == "running" and process(now) != process(before)

    job.until(over, "what follows the loss")
    until_more(job.records, job.ranks, AFTER, job.said)
    paused_s = watching.stop(began_s)
    loss.mend(job, host)
    return paused_s


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3, sys.argv[2] if len(sys.argv) > 2 else "")
