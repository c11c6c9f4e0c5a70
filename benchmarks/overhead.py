"""Measure what midstep costs while nothing happens: step time of a resilient script against plain DDP, in one run.

Twice, since each way has its weakness. *Paired*: plain and resilient steps by turns in the same processes, which is
precise and does not see what agents and controller take beside the ranks; a second plain model is the control.
*Jobs*: whole jobs by turns, plain DDP under torchrun and the resilient script under midstep, which sees all and wants
a quiet machine. On a machine that is not quiet the ratio of CPU time says more than that of step times: who waits for
others there gives its core away.

A ratio is taken step by step, over the mean of the two plain models in the same step; what is shown is the median of
all steps of all repetitions, with the interval that holds it in 95 of 100 such runs. Repetitions differ by more than
that, so their least and greatest median stand beside it.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from midstep.benchmarks import figures, launching, records
from midstep.benchmarks.recovery import LIMIT_S, console, ranks_of

PAIRED_SCRIPT = "overhead_job.py"
JOB_SCRIPT = "recovery_job.py"
KINDS = ("plain", "control", "resilient")
NOBODY = "-1"  # is killed
WARM_UP_STEPS = 6
STEPS_IN_PARTS = 12
SPREAD_OF_MEDIAN = 0.98  # half of 1.96: how far 95 of 100 medians lie from the middle, in roots of the sample's size
USES = {
    "cpu_s": ("CPU time, ms", 1000),
    "train_cpu_s": ("of it the train thread's, ms", 1000),
    "waits": ("cores given away", 1),
    "preemptions": ("cores taken away", 1),
    "page_faults": ("page faults", 1),
}

Notes = dict[str, float]


def paired(ranks: int, steps: int, number: int, folder: Path) -> tuple[list[Notes], Notes]:
    """Run one job of all kinds of steps; return what each step took, and the medians of the parts, over all ranks."""
    counts = (steps + WARM_UP_STEPS, STEPS_IN_PARTS, number)
    arguments = [str(folder), *map(str, counts)]
    launching.midstep(PAIRED_SCRIPT, arguments, ranks=ranks, job_directory=folder / "job", limit_s=LIMIT_S)
    by_rank = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    of_parts = [note["parts"] for notes in by_rank for note in notes[-STEPS_IN_PARTS:]]
    names = [f"{kind}_{use}" for kind in KINDS for use in ("s", *USES)]
    # Over the ranks the mean: what one waits for another has worked.
    of_steps = [
        {name: statistics.fmean(note[name] for note in notes) for name in names}
        for notes in list(zip(*by_rank, strict=True))[WARM_UP_STEPS:-STEPS_IN_PARTS]
    ]
    return of_steps, figures.medians(of_parts)


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
    with launching.progress(console) as progress:
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


def plain_of(step: Notes, use: str) -> float:
    """Return what a step took of something with plain DDP: the mean of the two."""
    return statistics.fmean((step[f"plain_{use}"], step[f"control_{use}"]))


def ratios(repetitions: list[list[Notes]], over: Callable[[Notes], float]) -> dict[str, float]:
    """Return the median ratio of all steps, the interval it lies in, and the medians of single repetitions."""
    values = sorted(over(step) for steps in repetitions for step in steps)
    reach = math.ceil(SPREAD_OF_MEDIAN * math.sqrt(len(values)))
    middle = len(values) // 2
    return {
        "low": values[max(0, middle - reach)],
        "high": values[min(len(values) - 1, middle + reach)],
        **figures.spread([statistics.median(over(step) for step in steps) for steps in repetitions]),
        "median": statistics.median(values),
    }


def summary(repetitions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and spreads, seconds; a ratio is resilient to plain, step by step.

    `control_ratio` is one plain model to the other: what a ratio is when there is no difference.
    """
    runs: list[list[Notes]] = [notes["paired"] for notes in repetitions]
    result: dict[str, Any] = {
        "plain_s": figures.spread([statistics.median(plain_of(step, "s") for step in steps) for steps in runs]),
        "resilient_s": figures.spread([statistics.median(step["resilient_s"] for step in steps) for steps in runs]),
        "ratio": ratios(runs, lambda step: step["resilient_s"] / plain_of(step, "s")),
        "cpu_ratio": ratios(runs, lambda step: step["resilient_cpu_s"] / plain_of(step, "cpu_s")),
        "control_ratio": ratios(runs, lambda step: step["control_s"] / step["plain_s"]),
        "control_cpu_ratio": ratios(runs, lambda step: step["control_cpu_s"] / step["plain_cpu_s"]),
        "more": {
            use: statistics.median(step[f"resilient_{use}"] - plain_of(step, use) for steps in runs for step in steps)
            for use in USES
        },
        "uses": {use: statistics.median(plain_of(step, use) for steps in runs for step in steps) for use in USES},
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


def ratio_text(found: Mapping[str, float] | None) -> str:
    """Return a ratio with its interval, where it has one, and the least and greatest of the repetitions."""
    if found is None:
        return ""
    interval = f" [{found['low']:.3f}, {found['high']:.3f}]" if "low" in found else ""
    return f"{found['median']:.3f}{interval} ({found['min']:.3f}-{found['max']:.3f})"


def table(result: dict[str, Any]) -> Table:
    """Show the step times."""
    view = Table(
        title="A step without fault: milliseconds, median [95 %] (least-greatest repetition)", title_justify="left"
    )
    for column in ("ranks", "", "plain DDP", "resilient", "ratio", "ratio of CPU time", "foreign cores"):
        view.add_column(column, justify="right" if column else "left")
    for ranks, found in result.items():
        for name, times in (("paired", found), ("jobs", found.get("jobs"))):
            if times is not None:
                steps = [figures.text(times[key], 1000, 1) for key in ("plain_s", "resilient_s")]
                shown = [ratio_text(times.get(key)) for key in ("ratio", "cpu_ratio")]
                view.add_row(ranks, name, *steps, *shown, figures.text(found["foreign_cores"]))
        shown = [ratio_text(found[key]) for key in ("control_ratio", "control_cpu_ratio")]
        view.add_row(ranks, "control", "", "", *shown, "")
    return view


def uses(result: dict[str, Any]) -> Table:
    """Show what the processes used up in a step, with plain DDP and more than that."""
    view = Table(title="Of a step, in one rank: plain DDP + what a resilient one takes more", title_justify="left")
    view.add_column("use")
    for ranks in result:
        view.add_column(f"{ranks} ranks", justify="right")
    for use, (name, factor) in USES.items():
        shown = [f"{factor * found['uses'][use]:.2f} + {factor * found['more'][use]:.2f}" for found in result.values()]
        view.add_row(name, *shown)
    return view


def parts(result: dict[str, Any]) -> Table:
    """Show what the difference is made of."""
    view = Table(
        title="Parts of a resilient step: microseconds of time, waiting included / of CPU time", title_justify="left"
    )
    view.add_column("part")
    for ranks in result:
        view.add_column(f"{ranks} ranks", justify="right")
    names = dict.fromkeys(name.rpartition("/")[0] for found in result.values() for name in found["parts_s"])
    for name in names:
        shown = [
            [1e6 * found["parts_s"].get(f"{name}/{kind}", 0.0) for kind in ("wall", "cpu")] for found in result.values()
        ]
        view.add_row(name, *(f"{wall:.0f} / {cpu:.0f}" for wall, cpu in shown))
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
    if not result:
        raise click.ClickException("no job came to its end")
    out = Console(width=None if console.is_terminal else 150, highlight=False)
    out.print(table(result), uses(result), parts(result))
    if file is not None:
        file.write_text(json.dumps({"ranks": result, "machine": figures.machine()}, indent=2))


if __name__ == "__main__":
    main()
