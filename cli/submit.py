"""`midstep submit`: a job in etcd, which controllers and agents on several machines work on."""

import os
from pathlib import Path
from typing import Any

import click

from ..protocol.errors import MidstepError
from .display.plain import echo
from .job_options import POLICY, PROGRAM, SCRIPT, SHAPE, asked_for, options
from .jobs.directories import base_directory, checked_name
from .jobs.start import new_name, policy_of, spec_of
from .store import store_option


@click.command("submit", context_settings={"allow_interspersed_args": False})
@store_option(required=True)
@click.option("--job", help="A name for the job.  [default: the time of day]")
@click.option(
    "--job-dir",
    "job_directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where logs and checkpoints go, on each machine.  [default: ~/.midstep/jobs/JOB]",
)
@options(SHAPE, POLICY, PROGRAM, SCRIPT)
def command(
    *,
    store: str,
    job: str | None,
    job_directory: Path | None,
    **chosen: Any,
) -> None:
    """Put a job into etcd: SCRIPT on NNODES x NPROC-PER-NODE ranks. Nothing runs yet.

    Then start `midstep controller --store ... --standby` on some machines, any number, and `midstep agent` on each
    node. SCRIPT and the present directory have to be there on the nodes, under the same names.
    """
    from ..controller.etcd.journal import submit
    from ..controller.etcd.place import certificates_of, parse_place

    try:
        name = checked_name(job) if job is not None else new_name()
        start = asked_for(**chosen)
        policy = policy_of(start)
        directory = (job_directory or base_directory() / name).absolute()
        place = parse_place(store, name, certificates_of(os.environ))
        submit(place, spec_of(start, name, policy, directory), policy)
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    echo(f"{name}: submitted to {place}")
