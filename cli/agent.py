"""`midstep agent`: the agent of one node, as platforms start it."""

import asyncio
import logging
import sys
from pathlib import Path

import click

from ..protocol.errors import MidstepError
from .display.plain import log_to_stderr


@click.command("agent")
@click.option("--job", required=True, metavar="NAME", help="The job that the node works for.")
@click.option("--controller", required=True, metavar="ENDPOINT", help="Where the controller listens, tcp://host:port.")
@click.option("--node", required=True, metavar="NAME", help="The node's name; its keys are made out to it.")
@click.option(
    "--keys",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory with the node's client keys.",
)
@click.option(
    "--run-dir",
    "run_directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the node's socket; its path must be short.",
)
@click.option("--failure-domain", default="", metavar="NAME", help="What fails together. [default: the node]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address under which other nodes reach this one.")
@click.option("--life-fd", type=int, help="End when this inherited pipe is closed at its other end.")
def command(
    *,
    job: str,
    controller: str,
    node: str,
    keys: Path,
    run_directory: Path,
    failure_domain: str,
    host: str,
    life_fd: int | None,
) -> None:
    """Start and watch training processes on this node, as the controller of JOB says, until the job ends.

    Everything that the agent has started ends with it, even when it is killed.
    """
    from ..agent.main import AgentOptions, serve

    log_to_stderr(logging.INFO, f"%(asctime)s {node} %(levelname)s %(message)s")
    options = AgentOptions(
        job=job,
        node=node,
        controller=controller,
        keys=str(keys),
        run_directory=str(run_directory.resolve()),
        failure_domain=failure_domain,
        host=host,
        life_fd=life_fd,
    )
    try:
        sys.exit(asyncio.run(serve(options)))
    except MidstepError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    command()
