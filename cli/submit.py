"""`midstep submit`: a job in a store or in a directory, which controllers and agents on several machines work on."""

import os
from pathlib import Path
from typing import Any

import click

from ..launch.directories import base_directory, checked_name, is_job
from ..launch.job import found_in_directory, new_name, policy_of, spec_of
from ..policies.schema import Policy
from ..protocol.errors import ConfigurationError
from ..protocol.types import JobSpec
from .display.plain import echo
from .frame import Command, store_option
from .job_options import POLICY, PROGRAM, ROLES, SCRIPT_OR_ROLES, SHAPE, asked_for, options


@click.command("submit", cls=Command, context_settings={"allow_interspersed_args": False})
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
@options(SHAPE, ROLES, POLICY, PROGRAM, SCRIPT_OR_ROLES)
def command(
    *,
    roles_file: Path | None,
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

    With --roles FILE it is a job of several roles on Kubernetes, which the launcher in its pod takes from JOB-DIR.
    """
    if roles_file is not None:
        echo(_submit_roles(roles_file, store, job, job_directory, platform, if_absent=if_absent))
        return
    if chosen["script"] is None:
        raise click.UsageError("Missing argument 'SCRIPT', or --roles FILE.")
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
    echo(f"{name}: {'submitted to' if is_new else 'is already at'} {place}")


def _submit_roles(
    file: Path, store: str | None, job: str | None, job_directory: Path | None, platform: str, *, if_absent: bool
) -> str:
    """Put a job of roles into its directory, and say where it is. Raises ConfigurationError."""
    from ..launch.directories import found_group, is_group
    from ..launch.roles import new_group

    if platform != "kubernetes" or store is not None or job is None or job_directory is None:
        raise ConfigurationError(
            "--roles: a job of roles is submitted in a pod of it, with --platform kubernetes, --job and --job-dir, and "
            "without --store. Elsewhere `midstep run --roles` runs it."
        )
    if if_absent and is_group(job_directory):
        return f"{job}: is already at {job_directory}"
    new = new_group(file, job=job, job_directory=job_directory, environment={}, platform=platform)
    found_group(new.directory, new.founding)
    return f"{job}: submitted to {new.directory}"


def _into_store(store: str, spec: JobSpec, policy: Policy, platform: str) -> tuple[str, bool]:
    """Return where the job is, and whether it is new there."""
    from ..controller.journal.volume_place import is_volume, parse_volume_place
    from ..controller.journal.volume_store import submit as submit_to_volume

    if is_volume(store):
        return store, submit_to_volume(parse_volume_place(store).folder, spec, policy, platform)
    from ..controller.etcd.place import access_of, parse_place
    from ..controller.journal.etcd_store import submit

    place = parse_place(store, spec.job, access_of(os.environ))
    return str(place), submit(place, spec, policy, platform)
