"""`midstep resume`: a job whose launcher or machine was lost continues."""

import logging
import sys

import click

from ..protocol.errors import MidstepError
from .display.plain import log_to_stderr
from .display.tolerant_output import hold_standard_descriptors
from .jobs.continuation import continued
from .jobs.directories import find_job_or_group
from .roles.group_files import is_group, read_founding
from .run import launch


@click.command("resume")
@click.argument("job", required=False, metavar="[JOB]")
@click.option("-q", "--quiet", is_flag=True, help="Do not show what the ranks print; their logs are kept.")
def command(*, job: str | None, quiet: bool) -> None:
    """Continue a job whose launcher or machine was lost: from its journal and its newest checkpoint, budgets kept.

    Script, arguments, policy and shape are those that the job was started with; the script and the directory in which
    it was started have to be there. To continue on another machine, bring the whole job directory there, under the same
    path, and the checkpoints if they are elsewhere.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. A job of several
    roles continues with each of its roles from there. Exit codes are those of `midstep run`.
    """
    hold_standard_descriptors()
    log_to_stderr(logging.WARNING, "midstep: %(message)s")
    try:
        directory = find_job_or_group(job)
        if is_group(directory) and read_founding(directory).platform == "kubernetes":
            from .kubernetes.role_group import run_in_pod

            sys.exit(run_in_pod(directory, quiet=quiet))
        if is_group(directory):
            from .roles.opening import reopened_group
            from .roles.running import launch_roles

            sys.exit(launch_roles(reopened_group(directory), quiet=quiet))
        sys.exit(launch(continued(directory), quiet=quiet))
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
