"""Measure each kind of replica in a Megatron job, against plain Megatron under torchrun, and how long a recovery takes.

Whole jobs by turns, data parallel with a distributed optimizer, over models of several sizes: what midstep does in a
step is partly the same for every model, and partly grows with it. On a machine that is not quiet the CPU time says more
than the clock: who waits for others there gives its core away. Still more says what share of its own step the train
thread spends in midstep's parts, since nothing of another job is in that. The recovery is that of one kill in a
forward pass, phase by phase, for each kind that keeps a copy.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from midstep.benchmarks import launching
from midstep.protocol import environment as env
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

SCRIPT = "jobs/megatron_job.py"
POLICY = Path(__file__).resolve().parents[1] / "configs" / "demo-megatron.yaml"  # the fork server has Megatron imported
WARM_UP_STEPS = 10
KINDS = ("plain", "none", "instances", "buddy_device", "buddy_host")
WITH_COPIES = ("instances", "buddy_device", "buddy_host")
SIZES = {"tiny": "2,64,4,64", "small": "4,192,6,64"}  # layers, width, heads, context
PHASES = ("detecting", "suspecting", "quiescing", "rejoining", "resuming")
LIMIT_S = 600.0

Notes = dict[str, float]


def job(kind: str, size: str, ranks: int, steps: int, folder: Path, *, kill_at: int | None = None) -> Notes:
    """Run one job; return its medians over steps, and the mean over ranks."""
    folder.mkdir()
    arguments = [str(folder), str(steps), kind, SIZES[size]]
    if kind == "plain":
        launching.torchrun(SCRIPT, arguments, ranks=ranks, max_restarts=0, limit_s=LIMIT_S)
    else:
        faults = [] if kill_at is None else [ArmedFault(1, FaultAction.KILL, InjectionPoint.FORWARD, kill_at, 1)]
        os.environ[env.FAULTS] = msgspec.json.encode(faults).decode()
        launching.midstep(SCRIPT, arguments, ranks=ranks, job_directory=folder / "job", limit_s=LIMIT_S, policy=POLICY)
    notes = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "step_s": statistics.fmean(statistics.median(note["times_s"][WARM_UP_STEPS:]) for note in notes),
        "step_cpu_s": statistics.fmean(statistics.median(note["cpu_times_s"][WARM_UP_STEPS:]) for note in notes),
        "thread_s": statistics.fmean(statistics.median(note["thread_times_s"][WARM_UP_STEPS:]) for note in notes),
        "commit_s": statistics.fmean(part(note, lambda each: each["commit"] - each["arrive"]) for note in notes),
        "exchange_s": statistics.fmean(part(note, lambda each: each["send"] + each["arrive"]) for note in notes),
        "peer_copy_s": statistics.fmean(part(note, lambda each: each["peer_copy"]) for note in notes),
        **{
            name: statistics.fmean(note[name] for note in notes)
            for name in ("tensor_bytes", "resident_bytes", "parameters")
        },
    }


def part(note: dict[str, Any], chosen: Callable[[dict[str, float]], float]) -> float:
    """Return the median over steps of a part of a step."""
    return statistics.median(chosen(each) for each in note["parts_s"][WARM_UP_STEPS:])


def incident(directory: Path) -> dict[str, Any]:
    """Return the incident of a job, as `midstep report --json` has it."""
    command = [sys.executable, "-m", "midstep.cli.main", "report", "--json", str(directory)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=LIMIT_S)
    found: dict[str, Any] = json.loads(done.stdout)["incidents"][0]
    return {"recovery_s": found["recovery_s"], "phases": found["phases"]}


def medians(notes: list[Notes]) -> Notes:
    """Return the median of each number over the repetitions."""
    return {name: statistics.median(note[name] for note in notes) for name in notes[0]}


def print_costs(size: str, costs: dict[str, Notes]) -> None:
    """Print one line for each kind."""
    plain = costs["plain"]
    print(f"{size}: {plain['parameters'] / 1e6:.2f} M parameters")
    for kind, cost in costs.items():
        more_bytes = cost["tensor_bytes"] - plain["tensor_bytes"]
        print(
            f"  {kind:13} step {cost['step_s'] * 1e3:7.1f} ms, {cost['step_s'] / plain['step_s']:5.2f} x plain; "
            f"CPU {cost['step_cpu_s'] * 1e3:7.1f} ms, {cost['step_cpu_s'] / plain['step_cpu_s']:5.2f} x, "
            f"{(cost['step_cpu_s'] - plain['step_cpu_s']) * 1e3:+6.1f} ms; "
            f"tensors {cost['tensor_bytes'] / 1e6:6.2f} MB, {more_bytes / 1e6:+6.2f} MB",
            flush=True,
        )
    for kind, cost in costs.items():
        commit_s, exchange_s, peer_copy_s = cost["commit_s"], cost["exchange_s"], cost["peer_copy_s"]
        rest_s = cost["thread_s"] - commit_s - exchange_s - peer_copy_s
        print(
            f"  {kind:13} train thread {cost['thread_s'] * 1e3:6.1f} ms CPU: commit {commit_s * 1e3:.2f}, "
            f"gradients {exchange_s * 1e3:.2f}, peer copy's update {peer_copy_s * 1e3:.2f}; "
            f"{cost['thread_s'] / rest_s:.3f} x the rest",
            flush=True,
        )


def print_recoveries(recoveries: dict[str, list[dict[str, Any]]]) -> None:
    """Print one line for each kind that keeps copies."""
    for kind, incidents in recoveries.items():
        total_s = statistics.median(each["recovery_s"] for each in incidents)
        phases = {name: statistics.median(each["phases"].get(name, 0.0) for each in incidents) for name in PHASES}
        told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        print(f"{kind:13} recovery {total_s:.2f} s: {told}", flush=True)


@click.command()
@click.option("--ranks", type=click.IntRange(min=4), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(min=20), default=60, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--size", "sizes", type=click.Choice(list(SIZES)), multiple=True, default=tuple(SIZES), show_default=True)
@click.option("--kind", "kinds", type=click.Choice(KINDS[1:]), multiple=True, default=KINDS[1:], help="Beside plain.")
@click.option("--recovery/--no-recovery", default=True, show_default=True, help="Measure recoveries, too.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers as JSON.")
def main(
    *,
    ranks: int,
    steps: int,
    repeat: int,
    sizes: tuple[str, ...],
    kinds: tuple[str, ...],
    recovery: bool,
    json_file: Path | None,
) -> None:
    """Measure, and print medians."""
    launching.end_jobs_on_sigterm()
    costs: dict[str, dict[str, list[Notes]]] = {size: {kind: [] for kind in (KINDS[0], *kinds)} for size in sizes}
    recoveries: dict[str, list[dict[str, Any]]] = {kind: [] for kind in WITH_COPIES if recovery and kind in kinds}
    foreign_cores = launching.foreign_cores()
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as directory:
        for turn in range(repeat):
            for size in sizes:
                for kind in costs[size]:
                    costs[size][kind].append(job(kind, size, ranks, steps, Path(directory) / f"{size}-{kind}-{turn}"))
            for kind, incidents in recoveries.items():
                folder = Path(directory) / f"kill-{kind}-{turn}"
                job(kind, sizes[0], ranks, steps, folder, kill_at=steps // 2)
                incidents.append(incident(folder / "job"))
    print(f"{ranks} ranks, {steps} steps, medians of {repeat}; others used {foreign_cores:.1f} cores at the beginning")
    for size in sizes:
        print_costs(size, {kind: medians(found) for kind, found in costs[size].items()})
    print_recoveries(recoveries)
    if json_file is not None:
        found = {
            "ranks": ranks,
            "steps": steps,
            "repeat": repeat,
            "foreign_cores": foreign_cores,
            "sizes": {size: SIZES[size] for size in sizes},
            "costs": costs,
            "recoveries": recoveries,
        }
        json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
