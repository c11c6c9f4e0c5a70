"""`midstep submit`: a job in a store or in a directory, which controllers and agents on several machines work on."""

import os
from pathlib import Path
from typing import Any

import click

from ..policies.schema import Policy
from ..protocol.errors import ConfigurationError, MidstepError
from ..protocol.types import JobSpec
from .display.plain import echo
from .job_options import POLICY, PROGRAM, SCRIPT, SHAPE, asked_for, options
from .jobs.directories import base_directory, checked_name, is_job
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
@click.option("--if-absent", is_flag=True, help="Do nothing where there is a job of this name already.")
@options(SHAPE, POLICY, PROGRAM, SCRIPT)
def command(
    *,
    store: str | None,
    job: str | None,
    job_directory: Path | None,
    platform: str,
    if_absent: bool,
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
        place, is_new = str(directory), True
        if store is not None:
            place, is_new = _into_store(store, spec, policy, platform)
        elif if_absent and is_job(directory):
            is_new = False
        else:
            found_in_directory(directory, spec, policy, platform=platform)
        if not is_new and not if_absent:
            raise ConfigurationError(f"{place}: there is a job of this name already. Choose another --job.")
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    echo(f"{name}: {'submitted to' if is_new else 'is already at'} {place}")


def _into_store(store: str, spec: JobSpec, policy: Policy, platform: str) -> tuple[str, bool]:
    """Return where the job is, and whether it is new there."""
    from ..controller.volume.journal import submit as submit_to_volume
    from ..controller.volume.place import is_volume, parse_volume_place

    if is_volume(store):
        return store, submit_to_volume(parse_volume_place(store).folder, spec, policy, platform)
    from ..controller.etcd.journal import submit
    from ..controller.etcd.place import access_of, parse_place

    place = parse_place(store, spec.job, access_of(os.environ))
    return str(place), submit(place, spec, policy, platform)
