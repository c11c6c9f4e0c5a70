"""`midstep stop`: end a running job."""

import getpass

import click

from ..controller.endpoints.control_requests import StopJobRequest
from .control import tell
from .display.plain import echo

ASK_S = 10.0


@click.command("stop")
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--reason", metavar="TEXT", help="Why; it is kept in the job's journal.  [default: your user name]")
def command(job: str | None, reason: str | None) -> None:
    """End a running job: its processes, agents and controller, in order. Its journal, logs and checkpoints stay.

    A checkpoint is written first, where that is possible. A second `midstep stop` does not wait for it any more.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant.

    \b
    Examples:
      midstep stop                                the latest job
      midstep stop demo --reason "enough steps"
    """
    echo(tell(job, StopJobRequest(reason or f"midstep stop by {_user()}"), ASK_S))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "an operator"
