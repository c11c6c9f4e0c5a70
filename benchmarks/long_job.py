"""A job of months, and how small it stays: files, memory, the cost of an incident, the start of the next controller.

    python benchmarks/long_job.py [--incidents 10000] [--ranks 16] [--json FILE]

Real driver, wire and journal on the disk; nodes are played in the same process (`turns.py`), so nothing waits and
months pass in minutes. One rank after the other is lost, with all that follows. On the way the job's folder is counted,
and a copy of it is taken over by a process of its own, as the next controller does it.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import figures
import msgspec
import psutil

from midstep.benchmarks.turns import RANKS_PER_NODE, Job, patient_policy
from midstep.controller.journal.sqlite_file import journal_path
from midstep.policies.schema import Budget, Policy, RungPolicy
from midstep.protocol.types import Rung

MARKS = (100, 300, 1000, 3000, 10_000, 30_000, 100_000)
LATEST = 100  # incidents whose cost is told
RESTARTS = 3
MANY, WINDOW_S = 10_000, 1.0  # some ten incidents of this job
MEGABYTE = 1e6
_RESTART = """
import json, pathlib, sys
from controller_restart import restart
print(json.dumps(restart(pathlib.Path(sys.argv[1]))))
"""
_HERE = Path(__file__).parent


def endless_policy() -> Policy:
    """Return the default policy with budgets that are never spent. As months do, its windows end within the job."""
    policy = patient_policy()
    budget = Budget(per_rank=MANY, per_node=MANY, per_job=MANY, window_s=WINDOW_S)
    return msgspec.structs.replace(
        policy,
        ladder=(RungPolicy(Rung.RECOVER_IN_PLACE, budget=budget), RungPolicy(Rung.STOP)),
        node=msgspec.structs.replace(policy.node, failures=MANY, window_s=WINDOW_S),
    )


def folder(root: Path) -> dict[str, float]:
    """Return how many files a job's folder has, and their size."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def next_controller(root: Path) -> list[dict[str, float]]:
    """Let new processes take a copy of the job over, one after the other; return what each took."""
    taken = []
    for _ in range(RESTARTS):
        with tempfile.TemporaryDirectory(prefix="ms-") as name:
            copy = Path(name) / "job"
            shutil.copytree(root, copy)
            command = [sys.executable, "-c", _RESTART, str(copy)]
            ran = subprocess.run(command, cwd=_HERE, check=True, capture_output=True, text=True)
            taken.append(json.loads(ran.stdout))
    return taken


def looked_at(job: Job, root: Path, incidents: int, costs_s: Sequence[float]) -> dict[str, Any]:
    """Return how the job stands after so many incidents."""
    restarts = next_controller(root)
    return {
        "incidents": incidents,
        "ranks": job.size,
        **folder(root),
        "journal_bytes": journal_path(root).stat().st_size,
        "memory_bytes": psutil.Process().memory_info().rss,
        "incident_cpu_s": figures.spread(costs_s[-LATEST:]),
        "restart_s": figures.spread([each["total_s"] for each in restarts]),
        "replayed": statistics.median(each["replayed"] for each in restarts),
        "snapshot_bytes": restarts[0]["snapshot_bytes"],
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    sizes = "".join(f" {row[key] / MEGABYTE:>12.1f}" for key in ("bytes", "snapshot_bytes", "memory_bytes"))
    cost, restart = figures.text(row["incident_cpu_s"], 1e3, 1), figures.text(row["restart_s"])
    return f"{row['incidents']:>9} {row['files']:>6}{sizes} {cost:>24} {restart:>18}"


@click.command(help=__doc__)
@click.option("--incidents", "most", default=10_000, show_default=True, help="Ranks that are lost.")
@click.option("--ranks", default=16, show_default=True, help="Size of the job, rounded up to whole nodes of 8.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all figures to FILE.")
def main(most: int, ranks: int, path: Path | None) -> None:
    """Play a job; print a table, and write JSON where it is asked for."""
    columns = f"{'incidents':>9} {'files':>6} {'folder MB':>12} {'snapshot MB':>12} {'memory MB':>12}"
    print(f"{columns} {'CPU ms of an incident':>24} {'next controller s':>18}")
    rows, costs_s, began_s = [], list[float](), time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="ms-"))
    try:
        job = Job(root, -(-ranks // RANKS_PER_NODE), endless_policy())
        try:
            for mark in sorted({*(each for each in MARKS if each < most), most}):
                while len(costs_s) < mark:
                    costs_s.append(job.lose(len(costs_s) % job.size))
                rows.append(looked_at(job, root, mark, costs_s))
                print(line(rows[-1]), flush=True)
        finally:
            job.close()
    finally:
        shutil.rmtree(root)
    print(f"{most} incidents in {time.monotonic() - began_s:.0f} s")
    if path is not None:
        path.write_text(json.dumps({"machine": figures.machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
