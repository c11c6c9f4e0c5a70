"""Give the controller of a job an order, or ask it something, for the commands of an operator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..controller.endpoints.control_requests import Accepted, Refused, Request, StatusReply, StatusRequest
from ..controller.endpoints.local_sockets import NoController
from ..launch.reached_job import (
    CONTROLLER_VARIABLE,
    TOKEN_FILE_VARIABLE,
    HereJob,
    ReachedJob,
    reached,
    what_became_of_it,
)
from ..protocol.errors import MidstepError


def tell(job: ReachedJob, request: Request, timeout_s: float) -> str:
    """Send a request to the controller of a job and return what follows from it. Raises ClickException if refused."""
    try:
        reply = job.ask(request, timeout_s)
    except NoController as error:
        why = what_became_of_it(job.directory) if isinstance(job, HereJob) else None
        raise click.ClickException(f"{job.name}: {why}" if why else str(error)) from error
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    if isinstance(reply, Accepted):
        return f"{job.name}: {reply.text}"
    if isinstance(reply, Refused):
        raise click.ClickException(f"{job.name}: {reply.reason}.")
    raise click.ClickException(
        f"{job.name}: the answer does not fit the request. Use the midstep version that runs the job."
    )


def the_job(job: str | None, controller: str | None, token_file: Path | None) -> ReachedJob:
    """Return the job that is meant. Raises ClickException."""
    try:
        return reached(job, controller, token_file)
    except MidstepError as error:
        raise click.ClickException(str(error)) from error


def ranks_on(job: ReachedJob, node: str, timeout_s: float) -> tuple[int, ...]:
    """Return the ranks that a node of a job has now. Raises ClickException if it has none."""
    try:
        reply = job.ask(StatusRequest(), timeout_s)
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    ranks = reply.status.ranks if isinstance(reply, StatusReply) else ()
    there = tuple(rank.rank for rank in ranks if rank.node == node)
    if not there:
        raise click.ClickException(f"no rank is on node {node}. See `midstep status` for nodes and their ranks.")
    return there


_Command = TypeVar("_Command", bound=Callable[..., Any])


def operator_options(command: _Command) -> _Command:
    """Add what a command needs to reach a job from another machine."""
    token_file = click.option(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With --controller: the file (mode 600) with a token of a role, from `midstep token --role`.  "
        f"[default: {TOKEN_FILE_VARIABLE}, or the token itself in MIDSTEP_TOKEN]",
    )
    controller = click.option(
        "--controller",
        metavar="HOST:PORT[,...]",
        help=f"Ask over the network, where the job's controllers listen.  [default: {CONTROLLER_VARIABLE}]",
    )
    return controller(token_file(command))
