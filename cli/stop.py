"""`midstep stop`: end a running job."""

import getpass
import socket
from pathlib import Path

import click

from ..controller.endpoints.control_requests import StopJobRequest
from ..launch.reached_job import HereJob
from ..protocol.errors import MidstepError
from .control import operator_options, tell, the_job
from .display.plain import echo

ASK_S = 10.0


@click.command("stop")
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--reason", metavar="TEXT", help="Why; it is kept in the job's journal.  [default: your user name]")
@operator_options
def command(*, job: str | None, reason: str | None, controller: str | None, token_file: Path | None) -> None:
    """End a running job: its processes, agents and controller, in order. Its journal, logs and checkpoints stay.

    A checkpoint is written first, where that is possible. A second `midstep stop` does not wait for it any more.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. A job of several
    roles is stopped as a whole, also when only JOB/ROLE is. With --controller it is the job's whole name, and the role
    has to be operator or admin.

    \b
    Examples:
      midstep stop                                the latest job
      midstep stop demo --reason "enough steps"
      midstep stop --controller m0:29400 --token-file operator.token
    """
    from ..launch.reached_job import group_meant, stop_group

    try:
        group = group_meant(job, controller)
        if group is not None:
            echo(stop_group(group))
            return
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    target = the_job(job, controller, token_file)
    by = _user() if isinstance(target, HereJob) else f"{_user()} on {socket.gethostname()}"
    echo(tell(target, StopJobRequest(reason or f"midstep stop by {by}"), ASK_S))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "an operator"
