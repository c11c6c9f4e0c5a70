"""Measure what a key of the policy costs a step: whole jobs by turns, without it and with it.

Each rank holds 126 MB or 1 GB, parameters and Adam's state, and no rank is killed. A ratio is that of a job's median
step to the one without of the same repetition. The cores that others use are written
beside the figures. With votes in some of the steps only, `time` is what all steps of a job take to what they would
without one: those with a vote are held against those around them in the same job.

copies: in host memory, one in every step, on the rank's node alone and on another one as well, and `auto`. Copying is
beside the step on another core, so on a machine without an idle core it is not hidden. votes: one in every step, in
which what a rank holds is hashed twice in the train thread; one in every Nth step costs that by N. audits: one in every
step, in which each rank repeats that of another one; one in every Nth step costs that by N.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.table import Table

from midstep.benchmarks import figures, launching, records
from midstep.benchmarks.recovery import LIMIT_S

SCRIPT = "recovery_job.py"
NOBODY = "-1"  # is killed
WARM_UP_STEPS = 6
STEP_S = 5.0  # at most, in the mean
COPYING = ["replica", "host_copy", "checkpoint"]
SIZES = {"126M": "ten_million", "1G": "eighty_million"}
POLICIES: dict[str, dict[str, dict[str, Any]]] = {
    "copies": {
        "every step": {"restore": COPYING, "host_copy": {"every_steps": 1}},
        "every step, on two nodes": {"restore": COPYING, "host_copy": {"every_steps": 1, "copies": 2}},
        "auto": {"restore": COPYING, "host_copy": {"every_steps": "auto"}},
    },
    "votes": {
        "every step": {"integrity": {"every_steps": 1}},
        "auto": {"integrity": {"every_steps": "auto"}},
    },
    "audits": {"every step": {"integrity": {"audit_steps": 1}}},
}


def run(policy: dict[str, Any], ranks: int, steps: int, size: str) -> tuple[float, float | None]:
    """Run one job; return its median step time, and what its votes cost where some steps have one. Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as name:
        folder = Path(name)
        (folder / "notes").mkdir()
        (folder / "policy.yaml").write_text(yaml.safe_dump({**policy, "checkpoint": {"every_steps": 0}}))
        launching.midstep(
            SCRIPT,
            [str(folder / "notes"), str(steps + WARM_UP_STEPS), NOBODY, SIZES[size]],
            ranks=ranks,
            job_directory=folder / "job",
            limit_s=LIMIT_S + STEP_S * steps,
            policy=folder / "policy.yaml",
        )
        return records.median_step_s(folder / "notes", ranks), records.cost_of_votes(folder / "notes", ranks)


def measure(policies: dict[str, dict[str, Any]], ranks: int, repeat: int, steps: int, size: str) -> dict[str, Any]:
    """Run all by turns; return medians in seconds, and ratios."""
    chosen = {"off": {}, **policies}
    foreign = [launching.foreign_cores()]
    found: dict[str, list[float]] = {name: [] for name in chosen}
    times: dict[str, list[float]] = {}
    for _ in range(repeat):
        for name, policy in chosen.items():
            step_s, time = run(policy, ranks, steps, size)
            found[name].append(step_s)
            if time is not None:
                times.setdefault(name, []).append(time)
        foreign.append(launching.foreign_cores())
    ratios = {name: [each / plain for each, plain in zip(found[name], found["off"], strict=True)] for name in found}
    more = {name: [each - plain for each, plain in zip(found[name], found["off"], strict=True)] for name in found}
    return {
        "ranks": ranks,
        "size": size,
        "foreign_cores": figures.spread(foreign),
        "step_s": {name: figures.spread(values) for name, values in found.items()},
        "more_s": {name: figures.spread(values) for name, values in more.items()},
        "ratio": {name: figures.spread(values) for name, values in ratios.items()},
        "time": {name: figures.spread(values) for name, values in times.items()},
    }


def shown(what: str, result: dict[str, Any]) -> Table:
    """Return the figures as a table."""
    title = f"{result['ranks']} ranks with {result['size']}B each"
    table = Table(what, "step, ms", "ratio", "more, ms", "time", title=title)
    for name, step_s in result["step_s"].items():
        more = figures.text(result["more_s"][name], 1000, 1)
        time = figures.text(result["time"][name], digits=4) if name in result["time"] else "-"
        table.add_row(name, figures.text(step_s, 1000, 1), figures.text(result["ratio"][name], digits=3), more, time)
    table.caption = f"foreign cores {figures.text(result['foreign_cores'])}"
    return table


@click.command(help=__doc__)
@click.argument("what", type=click.Choice(list(POLICIES)))
@click.option("--only", help="One of the settings beside `off`, by its name in the table.")
@click.option("--ranks", default=2, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@click.option("--steps", default=30, show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="126M", show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here.")
def main(what: str, *, only: str | None, ranks: int, repeat: int, steps: int, size: str, path: Path | None) -> None:
    """Measure, print, and write."""
    launching.end_jobs_on_sigterm()
    policies = {name: policy for name, policy in POLICIES[what].items() if only in {None, name}}
    if not policies:
        raise click.BadParameter(f"no setting {only!r}; there are {', '.join(POLICIES[what])}")
    result = {"machine": figures.machine(), **measure(policies, ranks, repeat, steps, size)}
    if path is not None:
        path.write_text(json.dumps(result, indent=1))
    Console().print(shown(what, result))


if __name__ == "__main__":
    main()
