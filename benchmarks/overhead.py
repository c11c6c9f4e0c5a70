"""What midstep costs while nothing happens: the step time of a resilient script against plain DDP, in the same run.

Twice, since each way has its weakness. *Paired*: plain and resilient steps by turns in the same processes, which is
precise and does not see what agents and controller take beside the ranks; a second plain model is the control.
*Jobs*: whole jobs by turns, plain DDP under torchrun and the resilient script under midstep, which sees all and wants
a quiet machine. On a machine that is not quiet the ratio of CPU time says more than that of step times: who waits for
others there gives its core away.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
from midstep.benchmarks import figures, launching, records
from midstep.benchmarks.recovery import LIMIT_S, console, ranks_of
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

PAIRED_SCRIPT = "overhead_job.py"
JOB_SCRIPT = "recovery_job.py"
KINDS = ("plain", "control", "resilient")
NOBODY = "-1"  # is killed
WARM_UP_STEPS = 6

Notes = dict[str, float]


def paired(ranks: int, steps: int, number: int, folder: Path) -> tuple[Notes, Notes]:
    """Run one job of all kinds of steps; return the median step times, and those of the parts, over all ranks."""
    arguments = [str(folder), str(steps + WARM_UP_STEPS), str(number)]
    launching.midstep(PAIRED_SCRIPT, arguments, ranks=ranks, job_directory=folder / "job", limit_s=LIMIT_S)
    by_rank = [json.loads((folder / f"rank-{rank}.json").read_text())[WARM_UP_STEPS:] for rank in range(ranks)]
    # Over the ranks the mean: what one waits for another has worked.
    times = {
        name: statistics.median(statistics.fmean(note[name] for note in notes) for notes in zip(*by_rank, strict=True))
        for name in (f"{kind}{clock}" for kind in KINDS for clock in ("_s", "_cpu_s"))
    }
    return times, figures.medians([note["parts"] for notes in by_rank for note in notes])


def job(system: str, ranks: int, steps: int, folder: Path) -> float:
    """Run one whole job without a fault; return its median step time."""
    notes = folder / "notes"
    notes.mkdir()
    arguments = [str(notes), str(steps + WARM_UP_STEPS), NOBODY]
    if system == "torchrun":
        launching.torchrun(JOB_SCRIPT, arguments, ranks=ranks, max_restarts=0, limit_s=LIMIT_S)
    else:
        launching.midstep(JOB_SCRIPT, arguments, ranks=ranks, job_directory=folder / "job", limit_s=LIMIT_S)
    return records.median_step_s(notes, ranks)


def measure(sizes: tuple[int, ...], repeat: int, steps: int, *, with_jobs: bool) -> dict[str, Any]:
    """Run everything in turn; return, by size, the repetitions."""
    found: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in sizes}
    look = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*look, console=console) as progress:
        task = progress.add_task("", total=repeat * len(sizes))
        for number in range(repeat):
            for ranks in sizes:
                progress.update(task, description=f"{ranks} ranks")
                try:
                    found[ranks].append(repetition(ranks, steps, number, with_jobs=with_jobs))
                except launching.JobFailed as error:
                    console.print(f"{ranks} ranks: {error}", style="red", markup=False)
                progress.advance(task)
    return {str(ranks): summary(repetitions) for ranks, repetitions in found.items() if repetitions}


def repetition(ranks: int, steps: int, number: int, *, with_jobs: bool) -> dict[str, Any]:
    """Measure once. Raises JobFailed."""
    notes: dict[str, Any] = {"foreign_cores": launching.foreign_cores()}
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as folder:
        notes["paired"], notes["parts"] = paired(ranks, steps, number, Path(folder))
    if with_jobs:
        notes["jobs"] = {}
        for system in ("torchrun", "midstep"):
            with tempfile.TemporaryDirectory(prefix="midstep-bench-") as folder:
                notes["jobs"][system] = job(system, ranks, steps, Path(folder))
    return notes


def summary(repetitions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and spreads, seconds; `ratio` is resilient to plain, repetition by repetition.

    `control_ratio` is one plain model to the other: what a ratio is when there is no difference.
    """
    pairs = [notes["paired"] for notes in repetitions]
    plain = [statistics.fmean((pair["plain_s"], pair["control_s"])) for pair in pairs]
    plain_cpu = [statistics.fmean((pair["plain_cpu_s"], pair["control_cpu_s"])) for pair in pairs]
    result: dict[str, Any] = {
        "plain_s": figures.spread(plain),
        "resilient_s": figures.spread([pair["resilient_s"] for pair in pairs]),
        "ratio": figures.spread([pair["resilient_s"] / base for pair, base in zip(pairs, plain, strict=True)]),
        "cpu_ratio": figures.spread(
            [pair["resilient_cpu_s"] / base for pair, base in zip(pairs, plain_cpu, strict=True)]
        ),
        "control_ratio": figures.spread([pair["control_s"] / pair["plain_s"] for pair in pairs]),
        "control_cpu_ratio": figures.spread([pair["control_cpu_s"] / pair["plain_cpu_s"] for pair in pairs]),
        "parts_s": figures.medians([notes["parts"] for notes in repetitions]),
        "foreign_cores": figures.spread([notes["foreign_cores"] for notes in repetitions]),
        "repetitions": repetitions,
    }
    jobs = [notes["jobs"] for notes in repetitions if "jobs" in notes]
    if jobs:
        result["jobs"] = {
            "plain_s": figures.spread([pair["torchrun"] for pair in jobs]),
            "resilient_s": figures.spread([pair["midstep"] for pair in jobs]),
            "ratio": figures.spread([pair["midstep"] / pair["torchrun"] for pair in jobs]),
        }
    return result


def table(result: dict[str, Any]) -> Table:
    """Show the step times."""
    view = Table(title="A step without fault: milliseconds, median (least-greatest)", title_justify="left")
    for column in ("ranks", "", "plain DDP", "resilient", "ratio", "ratio of CPU time", "foreign cores"):
        view.add_column(column, justify="right" if column else "left")
    for ranks, found in result.items():
        for name, times in (("paired", found), ("jobs", found.get("jobs"))):
            if times is not None:
                steps = [figures.text(times[key], 1000, 1) for key in ("plain_s", "resilient_s")]
                ratios = [figures.text(times[key], digits=3) if key in times else "" for key in ("ratio", "cpu_ratio")]
                view.add_row(ranks, name, *steps, *ratios, figures.text(found["foreign_cores"]))
        ratios = [figures.text(found[key], digits=3) for key in ("control_ratio", "control_cpu_ratio")]
        view.add_row(ranks, "control", "", "", *ratios, "")
    return view


def parts(result: dict[str, Any]) -> Table:
    """Show what the difference is made of."""
    view = Table(title="Parts of a resilient step: microseconds, medians, waiting included", title_justify="left")
    view.add_column("part")
    for ranks in result:
        view.add_column(f"{ranks} ranks", justify="right")
    for name in dict.fromkeys(name for found in result.values() for name in found["parts_s"]):
        view.add_row(name, *(f"{1e6 * found['parts_s'].get(name, 0.0):.0f}" for found in result.values()))
    return view


@click.command()
@click.option("--ranks", "sizes", multiple=True, default=("2", "4"), callback=ranks_of, show_default=True,
              help="Sizes of the world: a list with commas, or given repeatedly.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Repetitions.")
@click.option("--steps", type=click.IntRange(min=4), default=40, show_default=True, help="Steps of each kind.")
@click.option("--jobs/--no-jobs", "with_jobs", default=True, show_default=True, help="Whole jobs, too.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures to FILE.")
def main(sizes: tuple[int, ...], repeat: int, steps: int, with_jobs: bool, file: Path | None) -> None:
    """Measure what a step costs more under midstep than with plain DDP, and what of midstep it is.

    The model: a GPT of 10.5 million parameters, fp32, Adam, DDP over gloo, one sequence of 64 per rank.
    """
    launching.end_jobs_on_sigterm()
    result = measure(sizes, repeat, steps, with_jobs=with_jobs)
    out = Console(width=None if console.is_terminal else 120, highlight=False)
    out.print(table(result), parts(result))
    if file is not None:
        file.write_text(json.dumps({"ranks": result, "machine": figures.machine()}, indent=2))


if __name__ == "__main__":
    main()
