"""`midstep resume`: a job whose launcher or machine was lost continues."""

import logging
import sys
from functools import partial
from pathlib import Path

import click

from ..launch.directories import find_job_or_group, is_group, read_founding
from ..launch.job import continued
from ..launch.ray import is_on_ray
from ..launch.roles import reopened_group
from ..protocol.errors import ConfigurationError
from .display.plain import echo, hold_standard_descriptors, log_to_stderr
from .frame import Command
from .run import PlatformName
from .showing import continue_on_ray, run_job, run_roles


@click.command("resume", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option("-q", "--quiet", is_flag=True, help="Do not show what the ranks print; their logs are kept.")
@click.option(
    "--platform",
    type=click.Choice([PlatformName.LOCAL.value, PlatformName.RAY.value]),
    help="`local`: have all nodes of a job that began on Ray on this machine.  [default: where the job began]",
)
def command(*, job: str | None, quiet: bool, platform: str | None) -> None:
    """Continue a job whose launcher or machine was lost: from its journal and its newest checkpoint, budgets kept.

    Script, arguments, policy and shape are those that the job was started with; the script and the directory in which
    it was started have to be there. To continue on another machine, bring the whole job directory there, under the same
    path, and the checkpoints if they are elsewhere.

    A job that began on Ray continues on the Ray cluster that this machine is part of, which may be another one. If it
    still runs there, this command follows it.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. A job of several
    roles continues with each of its roles from there. Exit codes are those of `midstep run`.
    """
    hold_standard_descriptors()
    log_to_stderr(logging.WARNING, "midstep: %(message)s")
    directory = find_job_or_group(job)
    if is_group(directory):
        if platform is not None:
            raise ConfigurationError("--platform is for jobs of one script: roles continue where they began.")
        sys.exit(_resume_roles(directory, quiet=quiet))
    on_ray = is_on_ray(directory)
    if platform == PlatformName.RAY and not on_ray:
        raise ConfigurationError(f"{directory.name} did not begin on Ray: leave --platform out.")
    if on_ray and platform != PlatformName.LOCAL:
        sys.exit(continue_on_ray(directory, quiet=quiet))
    sys.exit(run_job(continued(directory), quiet=quiet))


def _resume_roles(directory: Path, *, quiet: bool) -> int:
    if read_founding(directory).platform == PlatformName.KUBERNETES:
        from ..launch.kubernetes.role import run_in_pod

        return run_in_pod(directory, partial(run_roles, quiet=quiet), echo)
    return run_roles(reopened_group(directory), quiet=quiet)
