"""How often a healthy job is suspected: thousands of steps by the clocks of a policy, of jobs with a slow data loader
and of examples.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from midstep import examples
from midstep.benchmarks import figures, launching
from midstep.benchmarks.false_alarms_job import LOADERS
from midstep.cli.report import load_status
from midstep.cli.views.incident_data import incident_json
from midstep.launch.reached_job import read_story
from midstep.protocol.reports import FaultReported
from midstep.protocol.types import FaultKind, FaultReport

SCRIPT = "false_alarms_job.py"
EXAMPLES = {
    "example": Path(examples.__file__).parent / "train_and_record.py",
    "megatron": Path(examples.__file__).parent / "megatron" / "train_and_record.py",
}
JOBS = (*LOADERS, *EXAMPLES)
TUNED = Path(__file__).parent / "peers" / "midstep-tuned.yaml"
WATCHFUL = Path(__file__).with_name("false_alarms.yaml")
POLICIES = {"default": None, "tuned": TUNED, "watchful": WATCHFUL}
SLOW = {FaultKind.SLOW, FaultKind.SLOW_LINK, FaultKind.SLOW_INPUT}
LIMIT_S = 4 * 3600.0


def watch(policy: str, job: str, ranks: int, steps: int) -> dict[str, Any]:
    """Run one job that nothing happens to; return what it was suspected of. Raises ClickException when it fails."""
    foreign = launching.foreign_cores()
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as folder:
        job_directory = Path(folder) / "job"
        began_s = time.monotonic()
        try:
            launching.midstep(
                str(EXAMPLES.get(job, SCRIPT)),
                [folder, str(steps)] if job in EXAMPLES else [str(steps), job],
                ranks=ranks,
                job_directory=job_directory,
                limit_s=LIMIT_S,
                policy=POLICIES[policy],
            )
        except launching.JobFailed as error:
            raise click.ClickException(str(error)) from error
        took_s = time.monotonic() - began_s
        incidents = [incident_json(each) for each in load_status(job_directory).incidents]
        slow = sorted({each.detail for each in _reports(job_directory) if each.kind in SLOW})
    return {
        "policy": policy,
        "job": job,
        "ranks": ranks,
        "steps": steps,
        "step_s": took_s / steps,
        "alarms": [incident["cause"] for incident in incidents] + slow,
        "recoveries": sum(incident["outcome"] != "dismissed" for incident in incidents),
        "foreign_cores": foreign,
    }


def _reports(job_directory: Path) -> Iterator[FaultReport]:
    """Yield each fault that was reported, also those that cost the job nothing."""
    for entry in read_story(job_directory):
        if isinstance(entry.event, FaultReported):
            yield entry.event.report


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=2, help="Processes.")
@click.option("--steps", default=20_000, help="Steps of each job.")
@click.option("--jobs", default=",".join(LOADERS), help=f"Of {', '.join(JOBS)}; with commas.")
@click.option("--policies", default="default,tuned", help="Which policies; with commas.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures to FILE.")
def main(*, ranks: int, steps: int, jobs: str, policies: str, file: Path | None) -> None:
    """Count the alarms in jobs that nothing happens to.

    In three of them each rank waits for its data by other times in each step, and for a quarter of a second in one of a
    hundred: many times as long as a step takes. These pauses come by chance (random) or on time (regular); or they are
    longer, come in one step of two thousand, and the script says that it waits for its data (rare). The other two are
    examples: DDP (example), and tensor parallel on megatron-core (megatron, of 2 ranks or a multiple). Any incident is
    a false alarm, and any rank that is called slow; one that costs a process or a repeated step is a recovery. The
    policy `watchful` has the ranks vote in each step, and drains a node whose rank is slow.
    """
    launching.end_jobs_on_sigterm()
    rows = []
    for policy, job in itertools.product(policies.split(","), jobs.split(",")):
        for found, allowed, what in ((policy, POLICIES, "policy"), (job, JOBS, "job")):
            if found not in allowed:
                raise click.BadParameter(f"no {what} {found!r}; there are {', '.join(allowed)}")
        rows.append(row := watch(policy, job, ranks, steps))
        click.echo(
            f"{policy}, {job}: {steps} steps of {ranks} ranks, {1000 * row['step_s']:.0f} ms each: "
            f"{len(row['alarms'])} alarms, {row['recoveries']} recoveries (foreign cores {row['foreign_cores']:.2f})"
        )
        for cause in row["alarms"]:
            click.echo(f"  {cause}")
    if file is not None:
        file.write_text(json.dumps({"rows": rows, "machine": figures.machine()}, indent=2))


if __name__ == "__main__":
    main()
