"""Measure what copies in host memory cost a step: whole jobs by turns.

Without copies, with one every step, on the rank's node alone and on another one as well, and with `auto`. Each rank
holds 126 MB, parameters and Adam's state, and no rank is killed. A ratio is that of a job's median step to the one
without copies of the same repetition. Copying is beside the step on another core, so on a machine without an idle core
it is not hidden; the cores that others use are written beside the figures.
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
COPYING = ["replica", "host_copy", "checkpoint"]
POLICIES: dict[str, dict[str, Any]] = {
    "off": {},
    "every step": {"restore": COPYING, "host_copy": {"every_steps": 1}},
    "every step, on two nodes": {"restore": COPYING, "host_copy": {"every_steps": 1, "copies": 2}},
    "auto": {"restore": COPYING, "host_copy": {"every_steps": "auto"}},
}


def median_step_s(policy: dict[str, Any], ranks: int, steps: int) -> float:
    """Run one job; return its median step time. Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as name:
        folder = Path(name)
        (folder / "notes").mkdir()
        (folder / "policy.yaml").write_text(yaml.safe_dump({**policy, "checkpoint": {"every_steps": 0}}))
        launching.midstep(
            SCRIPT,
            [str(folder / "notes"), str(steps + WARM_UP_STEPS), NOBODY],
            ranks=ranks,
            job_directory=folder / "job",
            limit_s=LIMIT_S,
            policy=folder / "policy.yaml",
        )
        return records.median_step_s(folder / "notes", ranks)


def measure(ranks: int, repeat: int, steps: int) -> dict[str, Any]:
    """Run all by turns; return medians in seconds, and ratios."""
    foreign = [launching.foreign_cores()]
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    for _ in range(repeat):
        for name, policy in POLICIES.items():
            found[name].append(median_step_s(policy, ranks, steps))
        foreign.append(launching.foreign_cores())
    ratios = {name: [each / plain for each, plain in zip(found[name], found["off"], strict=True)] for name in found}
    return {
        "ranks": ranks,
        "foreign_cores": figures.spread(foreign),
        "step_s": {name: figures.spread(values) for name, values in found.items()},
        "ratio": {name: figures.spread(values) for name, values in ratios.items()},
    }


def shown(result: dict[str, Any]) -> Table:
    """Return the figures as a table."""
    table = Table("copies", "step, ms", "ratio", title=f"{result['ranks']} ranks with 126 MB each")
    for name, step_s in result["step_s"].items():
        table.add_row(name, figures.text(step_s, 1000, 1), figures.text(result["ratio"][name], digits=3))
    table.caption = f"foreign cores {figures.text(result['foreign_cores'])}"
    return table


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@click.option("--steps", default=30, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here.")
def main(ranks: int, repeat: int, steps: int, path: Path | None) -> None:
    """Measure, print, and write."""
    launching.end_jobs_on_sigterm()
    result = {"machine": figures.machine(), **measure(ranks, repeat, steps)}
    if path is not None:
        path.write_text(json.dumps(result, indent=1))
    Console().print(shown(result))


if __name__ == "__main__":
    main()
