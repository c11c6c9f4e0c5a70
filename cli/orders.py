"""Orders to the controller of a running job: `midstep stop`, `midstep promote`, `midstep pause-failover`."""

import getpass
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..controller.endpoints import control_requests as requests
from ..launch.reached_job import HereJob, ReachedJob, reached
from ..protocol.controls import MOST_WHY, Control, PauseFailover, PromoteController
from ..protocol.errors import MidstepError
from ..protocol.incidents import ControllerPhase
from .display.plain import echo
from .frame import Command, operator_options, tell
from .numbers import duration_s

ASK_S = 10.0
LEADS_S = 15.0
LOOK_S = 0.5  # longer than the old leader takes to leave: what it is asked last gets no answer
LOOKED_S = 2.0
_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.command("stop", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--why", "--reason", "why", metavar="TEXT", help="Why; it is kept in the job's journal.  [default: your name]"
)
@operator_options
def stop(*, job: str | None, why: str | None, controller: str | None, token_file: Path | None) -> None:
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

    group = group_meant(job, controller)
    if group is not None:
        echo(stop_group(group))
        return
    target = reached(job, controller, token_file)
    echo(tell(target, requests.StopJobRequest(why or f"midstep stop by {asker(target)}"), ASK_S))


def reason(why: str) -> str:
    """Return the reason that an operator gives. Raises UsageError for none, and for one that is too long."""
    if not why.strip() or len(why) > MOST_WHY:
        raise click.UsageError(f"--why: write the reason, in at most {MOST_WHY:,} characters.")
    return why.strip()


def why_option(command: _Command) -> _Command:
    """Add --why to a command that may go without."""
    return click.option("--why", metavar="TEXT", help="The reason; with one, the job's journal keeps who asked.")(
        command
    )


def asker(target: ReachedJob) -> str:
    """Return who gives an order to a job, as it is written into the journal."""
    return _user() if isinstance(target, HereJob) else f"{_user()} on {socket.gethostname()}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "an operator"


@click.command("promote", cls=Command)
@click.argument("name")
@click.argument("job", required=False, metavar="[JOB]")
@why_option
@operator_options
def promote(*, name: str, job: str | None, why: str | None, controller: str | None, token_file: Path | None) -> None:
    """Let the controller NAME lead, which stands by, for example before its leader's machine is serviced.

    The present leader finishes what it writes and stands by itself. A recovery that is under way is continued by NAME.
    The command ends when NAME leads; if it does not within some seconds, any controller may lead again.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and the role has to be admin. Name all controllers there, with commas.

    \b
    Examples:
      midstep status                              which controllers there are
      midstep promote m1
      midstep promote m1 --controller m0:29400,m1:29400 --token-file admin.token
    """
    target = reached(job, controller, token_file)
    request = requests.PromoteRequest(name)
    echo(tell(target, _with_reason(target, request, PromoteController(name), why), ASK_S))
    until_s = time.monotonic() + LEADS_S
    while time.monotonic() < until_s:
        time.sleep(LOOK_S)
        term = _term_of(target, name)
        if term is not None:
            echo(f"{target.name}: {name} leads in term {term}")
            return
    raise click.ClickException(f"{target.name}: {name} does not lead after {LEADS_S:g} s; `midstep status` says more.")


def _with_reason(job: ReachedJob, request: requests.Request, control: Control, why: str | None) -> requests.Request:
    """Return the request, or, where a reason is given, the control of the same meaning, which the journal keeps."""
    return request if why is None else requests.ControlRequest(control, asker(job), reason(why))


def _term_of(job: ReachedJob, name: str) -> int | None:
    """Return the term in which a controller leads; None while it does not, or none answers."""
    try:
        reply = job.ask(requests.StatusRequest(), LOOKED_S)
    except MidstepError:
        return None
    known = reply.status.controllers if isinstance(reply, requests.StatusReply) else ()
    return next((each.term for each in known if each.name == name and each.phase is ControllerPhase.HOT), None)


@click.command("pause-failover", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--for",
    "for_s",
    callback=duration_s,
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="For how long, at most 1d: 90s, 10m, 2h. A pause that is forgotten ends by itself.",
)
@click.option("--end", is_flag=True, help="End the pause now.")
@why_option
@operator_options
def pause_failover(
    *, job: str | None, for_s: int, end: bool, why: str | None, controller: str | None, token_file: Path | None
) -> None:
    """Let no controller that stands by take over, for example while the leader is stopped in a debugger.

    Faults of the job are recovered as ever, by the present leader. If that ends meanwhile, training continues without
    recovery until a controller of the same --name is started, or one without --standby, or the pause has ended.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and the role has to be admin.

    \b
    Examples:
      midstep pause-failover --for 30m
      midstep pause-failover --end
    """
    if for_s > requests.MOST_PAUSED_S:
        raise click.UsageError(f"--for: at most {requests.MOST_PAUSED_S // 3600} hours")
    target, lasts_s = reached(job, controller, token_file), 0 if end else for_s
    request = requests.PauseFailoverRequest(lasts_s)
    echo(tell(target, _with_reason(target, request, PauseFailover(lasts_s), why), ASK_S))
