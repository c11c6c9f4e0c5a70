"""Measure what midstep costs a job whose model is sharded, and how long a killed rank holds it up, beside DDP.

steps: whole jobs by turns. The script under torchrun, where it is a plain one, is what the others are divided by: under
`midstep run` without copies in host memory, with one in every step, with as many as `auto` takes, and with a copy at a
buddy. Steps of one job differ from those of the next by some percent; how long all cores work for one says more.
recovery: rank 1 is killed once, in a job with DDP and in one on a mesh of two rows, or of one with a copy at a buddy,
by turns, where each rank holds as much (`--same rank`), or both train the same model (`--same model`).

Copying is beside the step on another core: a machine without an idle core does not hide it.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml
from rich.console import Console
from rich.table import Table

from midstep.benchmarks import figures, launching, records
from midstep.benchmarks.peers.hsdp.midstep import PRELOAD

SCRIPT, DDP = "fsdp_job.py", "ddp"
NO_RANK = -1
LIMIT_S = 900.0
KILLED_STEP, STEPS_OF_RECOVERY = 15, 20
SIZES = {"126M": 126_000_000, "1G": 1_000_000_000, "4M": 4_000_000}  # the last one: to try the script
PLAIN = "torchrun"
COPYING = ["replica", "host_copy", "checkpoint"]
POLICIES: dict[str, dict[str, Any]] = {
    "midstep": {},
    "midstep, a copy in every step": {"restore": COPYING, "host_copy": {"every_steps": 1}},
    "midstep, copies at `auto`": {"restore": COPYING, "host_copy": {"every_steps": "auto"}},
    "midstep, `replica: buddy`": {"replica": "buddy"},  # of use on one dimension
}


def run(
    folder: Path, policy: dict[str, Any] | None, ranks: int, steps: int, killed: int, mesh: str, size_bytes: int
) -> Path:
    """Run one job; return where its notes are. No policy: under torchrun. Raises JobFailed."""
    notes = folder / "notes"
    notes.mkdir()
    arguments = [str(notes), str(steps), str(killed), mesh, str(size_bytes)]
    if policy is None:
        launching.torchrun(SCRIPT, arguments, ranks=ranks, max_restarts=0, limit_s=LIMIT_S)
        return notes
    standby = {"preload": PRELOAD, **policy.get("standby", {})}
    given = {**policy, "checkpoint": {"every_steps": 0}, "standby": standby}
    (folder / "policy.yaml").write_text(yaml.safe_dump(given))
    launching.midstep(
        SCRIPT,
        arguments,
        ranks=ranks,
        job_directory=folder / "job",
        limit_s=LIMIT_S,
        policy=folder / "policy.yaml",
    )
    return notes


class Step(NamedTuple):
    """A step of a job: its median, and what all cores of the machine worked for one, launcher and agents included."""

    time_s: float
    busy_s: float


def step_of(policy: dict[str, Any] | None, mesh: str, size: str, steps: int) -> Step:
    """Measure a job to which nothing happens."""
    ranks = ranks_of(mesh)
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as name:
        notes = run(Path(name), policy, ranks, steps + records.WARM_UP_STEPS, NO_RANK, mesh, SIZES[size])
        began_s, ended_s = records.noted(notes, records.BUSY)
        return Step(records.median_step_s(notes, ranks), (ended_s - began_s) / steps)


def recovery(mesh: str, ranks: int, size_bytes: int, depth: str) -> records.Recovery:
    """Return the recovery of a job that loses rank 1 once, where each rank holds so many bytes."""
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as name:
        policy = {"standby": {"depth": depth}, "replica": "buddy"}  # on one dimension no other rank has the pieces
        notes = run(Path(name), policy, ranks, STEPS_OF_RECOVERY, KILLED_STEP, mesh, size_bytes)
        return records.recovery(notes, ranks, KILLED_STEP)


def ranks_of(mesh: str) -> int:
    """Return how many ranks a mesh has."""
    ranks = 1
    for part in mesh.split("x"):
        ranks *= int(part)
    return ranks


def by_turns(kinds: dict[str, Callable[[], Any]], repeat: int) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Measure each kind once in each turn; return what was found, and how many cores others took meanwhile."""
    found: dict[str, list[Any]] = {name: [] for name in kinds}
    foreign = [launching.foreign_cores()]
    for _ in range(repeat):
        for name, measure in kinds.items():
            found[name].append(measure())
        foreign.append(launching.foreign_cores())
    return found, figures.spread(foreign)


def steps_of(mesh: str, size: str, repeat: int, steps: int) -> dict[str, Any]:
    """Measure step times; return medians in seconds, and ratios to plain FSDP, turn by turn."""
    chosen: dict[str, dict[str, Any] | None] = {PLAIN: None, **POLICIES}
    kinds = {name: _once(step_of, policy, mesh, size, steps) for name, policy in chosen.items()}
    found, foreign = by_turns(kinds, repeat)
    times = {name: [each.time_s for each in values] for name, values in found.items()}
    busy = {name: [each.busy_s for each in values] for name, values in found.items()}
    return {
        "mesh": mesh,
        "size": size,
        "foreign_cores": foreign,
        "step_s": {name: figures.spread(values) for name, values in times.items()},
        "ratio": {name: _ratios(values, times[PLAIN]) for name, values in times.items()},
        "busy_s": {name: figures.spread(values) for name, values in busy.items()},
        "busy_ratio": {name: _ratios(values, busy[PLAIN]) for name, values in busy.items()},
    }


def recoveries_of(mesh: str, size: str, repeat: int, depth: str, *, same_model: bool) -> dict[str, Any]:
    """Measure recoveries; return medians in seconds, and the ratio to DDP's, turn by turn."""
    ranks, columns = ranks_of(mesh), int(mesh.rsplit("x", maxsplit=1)[-1])
    held = {DDP: SIZES[size] * (columns if same_model else 1), mesh: SIZES[size]}
    kinds = {name: _once(recovery, name, ranks, size_bytes, depth) for name, size_bytes in held.items()}
    found, foreign = by_turns(kinds, repeat)
    times = {name: [each.recovery_s for each in values] for name, values in found.items()}
    return {
        "mesh": mesh,
        "size": size,
        "same_model": same_model,
        "foreign_cores": foreign,
        "recovery_s": {name: figures.spread(values) for name, values in times.items()},
        "excess_s": {name: figures.spread([each.excess_s for each in values]) for name, values in found.items()},
        "step_s": {name: statistics.median(each.median_step_s for each in values) for name, values in found.items()},
        "ratio": {name: _ratios(values, times[DDP]) for name, values in times.items()},
    }


def _once(measure: Callable[..., Any], *given: Any) -> Callable[[], Any]:
    return lambda: measure(*given)


def _ratios(values: list[float], base: list[float]) -> dict[str, float]:
    return figures.spread([each / other for each, other in zip(values, base, strict=True)])


def shown(result: dict[str, Any]) -> Table:
    """Return the figures as a table."""
    what = "recovery_s" if "recovery_s" in result else "step_s"
    also = " of it, DDP of the same model" if result.get("same_model") else ""
    unit = ", s" if what == "recovery_s" else ", ms"
    table = Table(
        "", what.removesuffix("_s") + unit, "ratio", title=f"mesh {result['mesh']}, {result['size']}B a rank{also}"
    )
    busy = result.get("busy_s", {})
    for heading in ("all cores worked, ms", "ratio") if busy else ():
        table.add_column(heading)
    for name, values in result[what].items():
        factor = 1 if what == "recovery_s" else 1000
        row = [figures.text(values, factor), figures.text(result["ratio"][name], digits=3)]
        if busy:
            row += [figures.text(busy[name], 1000), figures.text(result["busy_ratio"][name], digits=3)]
        table.add_row(name, *row)
    table.caption = f"foreign cores {figures.text(result['foreign_cores'])}"
    return table


@click.command(help=__doc__)
@click.argument("what", type=click.Choice(["steps", "recovery"]))
@click.option("--mesh", default="2x2", show_default=True, help="Columns (`2`: FSDP), or rows and columns (HSDP).")
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Turns.")
@click.option("--steps", type=click.IntRange(min=4), default=30, show_default=True, help="Steps of each job (steps).")
@click.option("--size", type=click.Choice(list(SIZES)), default="126M", show_default=True, help="State of each rank.")
@click.option(
    "--depth",
    type=click.Choice(["auto", "built"]),
    default="auto",
    show_default=True,
    help="`standby.depth` (recovery). With `auto` the job is too short for a process that is built ahead.",
)
@click.option(
    "--same",
    type=click.Choice(["rank", "model"]),
    default="rank",
    show_default=True,
    help="Equal in both jobs of a recovery: what a rank holds, or the model, of which DDP holds all in each rank.",
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here.")
def main(what: str, mesh: str, repeat: int, steps: int, size: str, depth: str, same: str, path: Path | None) -> None:
    """Measure, print, and write."""
    launching.end_jobs_on_sigterm()
    result = (
        steps_of(mesh, size, repeat, steps)
        if what == "steps"
        else recoveries_of(mesh, size, repeat, depth, same_model=same == "model")
    )
    if path is not None:
        path.write_text(json.dumps({"machine": figures.machine(), **result}, indent=1))
    Console().print(shown(result))


if __name__ == "__main__":
    main()
