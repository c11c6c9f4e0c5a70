"""`midstep submit`: a job in etcd or in a directory, which controllers and agents on several machines work on."""

import os
from pathlib import Path
from typing import Any

import click

from ..policies.schema import Policy
from ..protocol.errors import MidstepError
from ..protocol.types import JobSpec
from .display.plain import echo
from .job_options import POLICY, PROGRAM, SCRIPT, SHAPE, asked_for, options
from .jobs.directories import base_directory, checked_name
from .jobs.founding import found_in_directory
from .jobs.start import new_name, policy_of, spec_of
from .store import store_option


@click.command("submit", context_settings={"allow_interspersed_args": False})
@store_option()
@click.option("--job", help="A name for the job.  [default: the time of day]")
@click.option(
    "--job-dir",
    "job_directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where logs and checkpoints go, on each machine; without --store also the journal, where the controller runs."
    "  [default: ~/.midstep/jobs/JOB]",
)
@click.option(
    "--platform",
    default="",
    metavar="NAME",
    help="The platform that makes the job's nodes (`midstep platform`).  [default: they join by themselves]",
)
@options(SHAPE, POLICY, PROGRAM, SCRIPT)
def command(
    *,
    store: str | None,
    job: str | None,
    job_directory: Path | None,
    platform: str,
    **chosen: Any,
) -> None:
    """Put a job into etcd, or into a directory: SCRIPT on NNODES x NPROC-PER-NODE ranks. Nothing runs yet.

    Then start `midstep controller --store ... --standby` on some machines, any number, or one `midstep controller
    --job-dir ...`, and `midstep agent` on each node. SCRIPT and the present directory have to be there on the nodes,
    under the same names.
    """
    try:
        name = checked_name(job) if job is not None else new_name()
        start = asked_for(**chosen)
        policy = policy_of(start)
        directory = (job_directory or base_directory() / name).absolute()
        spec = spec_of(start, name, policy, directory)
        place = str(directory)
        if store is None:
            found_in_directory(directory, spec, policy, platform=platform)
        else:
            place = _into_etcd(store, spec, policy, platform)
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    echo(f"{name}: submitted to {place}")


def _into_etcd(store: str, spec: JobSpec, policy: Policy, platform: str) -> str:
    from ..controller.etcd.journal import submit
    from ..controller.etcd.place import access_of, parse_place

    place = parse_place(store, spec.job, access_of(os.environ))
    submit(place, spec, policy, platform)
    return str(place)
