"""Measure what votes of the ranks cost a step: whole jobs by turns, without votes and with one in every step.

Each rank holds 126 MB, parameters and Adam's state, and no rank is killed. A ratio is that of a job's median step to
the one without votes of the same repetition. A vote hashes twice what a rank holds, in the train thread: with a vote in
every Nth step its cost is that of one in every step by N. The cores that others use are written beside the figures.
"""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from midstep.benchmarks import figures, launching
from midstep.benchmarks.host_copies import median_step_s

POLICIES: dict[str, dict[str, Any]] = {"off": {}, "every step": {"integrity": {"every_steps": 1}}}


def measure(ranks: int, repeat: int, steps: int) -> dict[str, Any]:
    """Run all by turns; return medians in seconds, and ratios."""
    foreign = [launching.foreign_cores()]
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    for _ in range(repeat):
        for name, policy in POLICIES.items():
            found[name].append(median_step_s(policy, ranks, steps))
        foreign.append(launching.foreign_cores())
    ratios = {name: [each / plain for each, plain in zip(found[name], found["off"], strict=True)] for name in found}
    more = {name: [each - plain for each, plain in zip(found[name], found["off"], strict=True)] for name in found}
    return {
        "ranks": ranks,
        "foreign_cores": figures.spread(foreign),
        "step_s": {name: figures.spread(values) for name, values in found.items()},
        "more_s": {name: figures.spread(values) for name, values in more.items()},
        "ratio": {name: figures.spread(values) for name, values in ratios.items()},
    }


def shown(result: dict[str, Any]) -> Table:
    """Return the figures as a table."""
    table = Table("votes", "step, ms", "ratio", "more, ms", title=f"{result['ranks']} ranks with 126 MB each")
    for name, step_s in result["step_s"].items():
        more = figures.text(result["more_s"][name], 1000, 1)
        table.add_row(name, figures.text(step_s, 1000, 1), figures.text(result["ratio"][name], digits=3), more)
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
