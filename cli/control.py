"""Give the controller of a job an order, or ask it something, for the commands of an operator."""

from pathlib import Path

import click

from ..controller.endpoints.control_requests import Accepted, Refused, Request, StatusReply, StatusRequest
from ..controller.endpoints.control_socket import NoController, ask
from ..protocol.errors import MidstepError
from .jobs.directories import find_job
from .jobs.job_file import run_directory_of
from .jobs.run_directory import launcher_of
from .supervision.controller_notice import why_no_answer


def tell(job: str | None, request: Request, timeout_s: float) -> str:
    """Send a request to the controller of a job and return what follows from it. Raises ClickException if refused."""
    try:
        job_directory = find_job(job)
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    try:
        reply = ask(live_directory(job_directory), request, timeout_s)
    except NoController as error:
        why = what_became_of_it(job_directory)
        raise click.ClickException(f"{job_directory.name}: {why}" if why else str(error)) from error
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    if isinstance(reply, Accepted):
        return f"{job_directory.name}: {reply.text}"
    if isinstance(reply, Refused):
        raise click.ClickException(f"{job_directory.name}: {reply.reason}.")
    raise click.ClickException(
        f"{job_directory.name}: the answer does not fit the request. Use the midstep version that runs the job."
    )


def ranks_on(job: str | None, node: str, timeout_s: float) -> tuple[int, ...]:
    """Return the ranks that a node of a job has now. Raises ClickException if it has none."""
    try:
        reply = ask(live_directory(find_job(job)), StatusRequest(), timeout_s)
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    ranks = reply.status.ranks if isinstance(reply, StatusReply) else ()
    there = tuple(rank.rank for rank in ranks if rank.node == node)
    if not there:
        raise click.ClickException(f"no rank is on node {node}. See `midstep status` for nodes and their ranks.")
    return there


def what_became_of_it(job_directory: Path) -> str | None:
    """Return what the launcher and the system say about a controller that does not answer; None if nothing is known."""
    run_directory = run_directory_of(job_directory)
    return None if run_directory is None else why_no_answer(run_directory, launcher_of(run_directory))


def live_directory(job_directory: Path) -> Path:
    """Return the run directory of a job. Raises NoController if it never had one."""
    run_directory = run_directory_of(job_directory)
    if run_directory is None:
        raise NoController(f"{job_directory}: the job has not been started. Start it with `midstep run`.")
    return run_directory
