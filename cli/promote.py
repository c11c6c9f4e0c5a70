"""`midstep promote`: let another controller of a job lead."""

import time
from pathlib import Path

import click

from ..controller.endpoints.control_requests import PromoteRequest, StatusReply, StatusRequest
from ..launch.reached_job import ReachedJob
from ..protocol.errors import MidstepError
from ..protocol.incidents import ControllerPhase
from .control import operator_options, tell, the_job
from .display.plain import echo

ASK_S = 10.0
LEADS_S = 15.0
LOOK_S = 0.5  # longer than the old leader takes to leave: what it is asked last gets no answer
LOOKED_S = 2.0


@click.command("promote")
@click.argument("name")
@click.argument("job", required=False, metavar="[JOB]")
@operator_options
def command(*, name: str, job: str | None, controller: str | None, token_file: Path | None) -> None:
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
    target = the_job(job, controller, token_file)
    echo(tell(target, PromoteRequest(name), ASK_S))
    until_s = time.monotonic() + LEADS_S
    while time.monotonic() < until_s:
        time.sleep(LOOK_S)
        term = _term_of(target, name)
        if term is not None:
            echo(f"{target.name}: {name} leads in term {term}")
            return
    raise click.ClickException(f"{target.name}: {name} does not lead after {LEADS_S:g} s; `midstep status` says more.")


def _term_of(job: ReachedJob, name: str) -> int | None:
    """Return the term in which a controller leads; None while it does not, or none answers."""
    try:
        reply = job.ask(StatusRequest(), LOOKED_S)
    except MidstepError:
        return None
    known = reply.status.controllers if isinstance(reply, StatusReply) else ()
    return next((each.term for each in known if each.name == name and each.phase is ControllerPhase.HOT), None)
