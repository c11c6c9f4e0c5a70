"""How long training stands still when a rank is killed: midstep beside torchrun and torchft, same script, same run.

midstep is measured twice: as it comes, and with each rank's next process built ahead. torchft is measured where it is
installed, with short timeouts, and waits for a full world. All are measured by what the job's processes write down
themselves, step by step (`records.py`); what midstep reports of itself is used for the phases only.
"""

import dataclasses
import importlib.util
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from midstep.benchmarks import figures, launching, records
from midstep.cli.report import load_status
from midstep.cli.views.incident_data import incident_json
from midstep.devices.kinds import CPU, CUDA
from midstep.protocol.types import InjectionPoint

SCRIPT = "recovery_job.py"
MIDSTEP, BUILT, TORCHRUN, TORCHFT = SYSTEMS = ("midstep", "midstep built", "torchrun", "torchft")
OURS, OTHERS = (MIDSTEP, BUILT), (TORCHRUN, TORCHFT)
POLICIES = {MIDSTEP: None, BUILT: Path(__file__).with_name("built.yaml")}
MAX_RESTARTS = 3
LIMIT_S = 240.0

console = Console(stderr=True, highlight=False)


@dataclasses.dataclass(frozen=True)
class Run:
    """One recovery, and what the machine and midstep said to it."""

    recovery: records.Recovery
    foreign_cores: float
    phases: dict[str, float]
    rank_phases: dict[str, float]
    repair_bytes_per_s: float = 0.0  # of the newcomer, in rebuild and repair together
    transport_bytes_per_s: float = 0.0  # of the communicator alone, between the same ranks of the same job


def one_run(
    system: str, ranks: int, steps: int, killed_step: int, *, lose_node: bool = False, device: str = CPU
) -> Run:
    """Run one job with one kill. Raises JobFailed, or ValueError when it did not recover."""
    foreign = launching.foreign_cores()
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as folder:
        notes, job_directory = Path(folder) / "notes", Path(folder) / "job"
        notes.mkdir()
        arguments = [str(notes), str(steps), str(killed_step)]
        if system in OTHERS:
            if system == TORCHRUN:
                launching.torchrun(
                    SCRIPT, arguments, ranks=ranks, max_restarts=MAX_RESTARTS, limit_s=LIMIT_S, device=device
                )
            else:
                launching.torchft(SCRIPT, arguments, ranks=ranks, limit_s=LIMIT_S, device=device)
            recovery = records.recovery(notes, ranks, killed_step)
            return Run(recovery, foreign, recovery.newcomer, {})
        launching.midstep(
            SCRIPT,
            arguments,
            ranks=ranks,
            job_directory=job_directory,
            limit_s=LIMIT_S,
            policy=POLICIES[system],
            spares=int(lose_node),
            environment={records.LOSE_NODE: "1"} if lose_node else None,
            device=device,
        )
        recovery = records.recovery(notes, ranks, killed_step)
        incident = incident_json(load_status(job_directory).incidents[0])
        slowest = incident["slowest_rank_phases"]
        # Shards move in both phases: how much of them is left for repair says nothing about how fast they came.
        repair = incident["bytes_moved"] / (slowest[InjectionPoint.REBUILD] + slowest[InjectionPoint.REPAIR])
        transport = statistics.median(records.noted(notes, "transport_bytes_per_s"))
        return Run(recovery, foreign, incident["phases"], slowest, repair, transport)


def summary(runs: Sequence[Run], failures: int) -> dict[str, Any]:
    """Return what several recoveries amount to. Times are medians, in seconds, with least and greatest beside them."""
    found = [run.recovery for run in runs]
    spreads = {
        name: figures.spread([getattr(recovery, name) for recovery in found])
        for name in ("recovery_s", "excess_s", "wall_lost_s", "median_step_s")
    }
    return {
        **{name: spread["median"] for name, spread in spreads.items()},
        "phases": figures.medians([run.phases for run in runs]),
        "slowest_rank_phases": figures.medians([run.rank_phases for run in runs]),
        "newcomer": figures.medians([recovery.newcomer for recovery in found]),
        "repair_bytes_per_s": figures.spread([run.repair_bytes_per_s for run in runs]),
        "transport_bytes_per_s": figures.spread([run.transport_bytes_per_s for run in runs]),
        "steps_repeated": max(recovery.steps_repeated for recovery in found),
        "processes_started": max(recovery.processes_started for recovery in found),
        "spread": spreads,
        "foreign_cores": figures.spread([run.foreign_cores for run in runs]),
        "repetitions": len(runs),
        "failures": failures,
        "runs": [dataclasses.asdict(run) for run in runs],
    }


def measure(
    systems: Sequence[str], sizes: Sequence[int], repeat: int, one: Callable[[str, int], Run]
) -> dict[str, Any]:
    """Run everything in turn, so that all see the same weather; return the summaries by system and size."""
    runs: dict[tuple[str, int], list[Run]] = {(system, ranks): [] for ranks in sizes for system in systems}
    failures = dict.fromkeys(runs, 0)
    with launching.progress(console) as progress:
        task = progress.add_task("", total=repeat * len(runs))
        for _ in range(repeat):
            for (system, ranks), done in runs.items():
                last = f", last excess {done[-1].recovery.excess_s:.2f} s" if done else ""
                progress.update(task, description=f"{system}, {ranks} ranks{last}")
                try:
                    done.append(one(system, ranks))
                except (launching.JobFailed, ValueError) as error:
                    failures[system, ranks] += 1
                    console.print(f"{system}, {ranks} ranks: no recovery: {error}", style="red", markup=False)
                progress.advance(task)
    return {
        system: {
            str(ranks): summary(done, failures[name, ranks])
            for (name, ranks), done in runs.items()
            if done and name == system
        }
        for system in systems
    }


def table(result: dict[str, Any], lost: str) -> Table:
    """Show the summaries."""
    view = Table(title=f"{lost}: seconds, median (least-greatest)", title_justify="left")
    for column in ("ranks", "", "recovery", "excess over a step", "wall lost", "steps repeated", "processes started"):
        view.add_column(column, justify="left" if not column else "right")
    for ranks in sorted({ranks for system in SYSTEMS for ranks in result.get(system, {})}, key=int):
        for system in SYSTEMS:
            found = result.get(system, {}).get(ranks)
            if found is not None:
                spreads = [figures.text(found["spread"][name]) for name in ("recovery_s", "excess_s", "wall_lost_s")]
                view.add_row(ranks, system, *spreads, str(found["steps_repeated"]), str(found["processes_started"]))
    return view


def phases(result: dict[str, Any]) -> Table:
    """Show where the time went."""
    view = Table(title="Phases: milliseconds, medians", title_justify="left")
    for column in ("ranks", "", "phases"):
        view.add_column(column)
    for system in SYSTEMS:
        for ranks, found in result.get(system, {}).items():
            for name in ("phases", "slowest_rank_phases", "newcomer") if system in OURS else ("newcomer",):
                parts = ", ".join(f"{phase} {1000 * seconds:.0f}" for phase, seconds in found[name].items())
                view.add_row(ranks, f"{system} {name.replace('_', ' ')}", parts)
    return view


def ratios(result: Mapping[str, Any], system: str, other: str) -> dict[str, float]:
    """Return, for each size of the world, a system's excess over a step in times of another's."""
    others = result.get(other, {})
    return {
        ranks: found["excess_s"] / others[ranks]["excess_s"]
        for ranks, found in result.get(system, {}).items()
        if ranks in others
    }


def ranks_of(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[int, ...]:
    """Read `--ranks 2,4` and `--ranks 2 --ranks 4`."""
    try:
        sizes = tuple(dict.fromkeys(int(number) for part in given for number in part.split(",")))
    except ValueError as error:
        raise click.BadParameter(f"{given} is no list of numbers") from error
    if any(ranks < 2 for ranks in sizes):
        raise click.BadParameter("with less than 2 ranks nobody holds what is lost")
    return sizes


@click.command()
@click.option(
    "--ranks",
    "sizes",
    multiple=True,
    default=("2", "4", "8"),
    callback=ranks_of,
    show_default=True,
    help="Sizes of the world: a list with commas, or given repeatedly.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Recoveries of each kind.")
@click.option("--steps", type=click.IntRange(min=12), default=20, show_default=True, help="Steps of each job.")
@click.option("--only", type=click.Choice(SYSTEMS), help="Measure one of them.")
@click.option(
    "--lose-node", is_flag=True, help="Not rank 1, but its node is lost, and there is a spare one. No torchrun."
)
@click.option("--device", type=click.Choice([CPU, CUDA]), default=CPU, show_default=True, help="What ranks compute on.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures to FILE.")
def main(
    sizes: tuple[int, ...],
    repeat: int,
    steps: int,
    only: str | None,
    device: str,
    file: Path | None,
    *,
    lose_node: bool,
) -> None:
    """Measure how long a killed rank holds up training: midstep beside torchrun and torchft, in the same run.

    The job: a GPT of 10.5 million parameters, fp32, Adam, DDP over gloo (NCCL on GPUs, which ranks share), one sequence
    of 64 per rank. Rank 1 is killed once, between forward and backward of the step three quarters through. Under
    torchrun a checkpoint is written every 10 steps. torchft is left out where it is not installed. Recovery: from the
    kill until all ranks have completed one and the same step again.
    """
    launching.end_jobs_on_sigterm()
    killed_step = steps * 3 // 4
    here = SYSTEMS if importlib.util.find_spec("torchft") else SYSTEMS[:3]
    result = measure(
        (only,) if only else OURS if lose_node else here,
        sizes,
        repeat,
        lambda system, ranks: one_run(system, ranks, steps, killed_step, lose_node=lose_node, device=device),
    )
    result["machine"] = figures.machine()
    result["excess_ratio"] = ratios(result, MIDSTEP, TORCHRUN)
    out = Console(width=None if console.is_terminal else 120, highlight=False)
    out.print(table(result, "A node lost" if lose_node else "One rank killed"), phases(result))
    for ranks, found in result.get(MIDSTEP, {}).items():
        repair, transport = (found[f"{name}_bytes_per_s"] for name in ("repair", "transport"))
        share = repair["median"] / transport["median"]
        out.print(
            f"{ranks} ranks: in rebuild and repair state came at {figures.text(repair, 1e-9)} GB/s, the transport "
            f"alone does {figures.text(transport, 1e-9)} GB/s: {share:.0%}"
        )
    for system, other in itertools.product(OURS, OTHERS):
        for ranks, ratio in ratios(result, system, other).items():
            out.print(f"{ranks} ranks: {system}'s excess is {ratio:.3f} of {other}'s")
    if file is not None:
        file.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
