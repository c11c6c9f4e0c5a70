"""What each kind of replica costs a Megatron job, against plain Megatron under torchrun, and how long a recovery takes.

Whole jobs by turns, four data parallel ranks with a distributed optimizer. Jobs are compared, on a quiet machine.
The recovery is that of one kill in a forward pass, phase by phase, for each kind that keeps a copy.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
from midstep.benchmarks import launching

from midstep.protocol import environment as env
from midstep.protocol.types import ArmedFault, Injury, Moment

SCRIPT = "megatron_job.py"
RANKS = 4
WARM_UP_STEPS = 10
KINDS = ("plain", "none", "instances", "buddy_device")
WITH_COPIES = ("instances", "buddy_device")
PHASES = ("detecting", "suspecting", "quiescing", "rejoining", "resuming")
LIMIT_S = 300.0


def job(kind: str, steps: int, folder: Path, kill_at: int | None = None) -> tuple[dict[str, float], dict[str, Any]]:
    """Run one job; return its median step time and memory, and the incident if there was a kill."""
    folder.mkdir()
    arguments = [str(folder), str(steps), kind]
    if kind == "plain":
        launching.torchrun(SCRIPT, arguments, ranks=RANKS, max_restarts=0, limit_s=LIMIT_S)
    else:
        faults = [] if kill_at is None else [ArmedFault(1, Injury.KILL, Moment.FORWARD, kill_at, 1)]
        os.environ[env.FAULTS] = msgspec.json.encode(faults).decode()
        launching.midstep(SCRIPT, arguments, ranks=RANKS, job_directory=folder / "job", limit_s=LIMIT_S)
    notes = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    found = {
        "step_s": statistics.median(time for note in notes for time in note["times_s"][WARM_UP_STEPS:]),
        "memory_bytes": statistics.fmean(note["memory_bytes"] for note in notes),
    }
    return found, {} if kill_at is None else incident(folder / "job")


def incident(directory: Path) -> dict[str, Any]:
    """Return the incident of a job, as `midstep report --json` has it."""
    command = [sys.executable, "-m", "midstep.cli.main", "report", "--json", str(directory)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=LIMIT_S)
    found: dict[str, Any] = json.loads(done.stdout)["incidents"][0]
    return found


@click.command()
@click.option("--steps", type=click.IntRange(min=20), default=100, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers as JSON.")
def main(steps: int, repeat: int, json_file: Path | None) -> None:
    """Measure, and print medians."""
    launching.end_jobs_on_sigterm()
    costs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    recoveries: dict[str, list[dict[str, Any]]] = {kind: [] for kind in WITH_COPIES}
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as directory:
        for turn in range(repeat):
            for kind in KINDS:
                costs[kind].append(job(kind, steps, Path(directory) / f"{kind}-{turn}")[0])
            for kind in WITH_COPIES:
                recoveries[kind].append(job(kind, steps, Path(directory) / f"kill-{kind}-{turn}", steps // 2)[1])
    base_s = statistics.median(cost["step_s"] for cost in costs["plain"])
    for kind, found in costs.items():
        step_s = statistics.median(cost["step_s"] for cost in found)
        memory = statistics.median(cost["memory_bytes"] for cost in found)
        print(f"{kind:13} step {step_s * 1e3:7.1f} ms, {step_s / base_s:5.2f} x plain, memory {memory / 1e6:6.0f} MB")
    for kind, incidents in recoveries.items():
        total_s = statistics.median(each["recovery_s"] for each in incidents)
        phases = {name: statistics.median(each["phases"].get(name, 0.0) for each in incidents) for name in PHASES}
        told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        print(f"{kind:13} recovery {total_s:.2f} s: {told}")
    if json_file is not None:
        json_file.write_text(json.dumps({"repeat": repeat, "costs": costs, "recoveries": recoveries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
