"""`midstep proxy`: one connection to the controller for many nodes (docs/controllers.md)."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import click

from ..launch.directories import checked_name, claim_free_run_directory
from ..launch.job import required
from ..launch.meeting import host_name
from ..launch.proxy import Proxy, ProxyOptions
from ..protocol.discovery import endpoints
from ..protocol.errors import ConfigurationError
from ..protocol.exits import RESTART_HERE
from ..protocol.token import TOKEN_VARIABLE, full, job_of, read_token
from .display.plain import log_to_stderr
from .frame import Command, token_file_option
from .numbers import seconds

LEAVE_S = 600.0
LISTEN = "tcp://0.0.0.0:29410"


@click.command("proxy", cls=Command)
@click.option("--job", metavar="NAME", help="The job of the nodes.  [default: the one that the token names]")
@click.option("--controller", required=True, metavar="HOST:PORT[,...]", help="Where the job's controllers listen.")
@click.option("--listen", default=LISTEN, show_default=True, metavar="tcp://HOST:PORT", help="Where nodes connect.")
@click.option("--name", metavar="NAME", help="A name that no other proxy of the job has.  [default: the host's]")
@click.option(
    "--leave",
    "leave_s",
    type=seconds(),
    default=LEAVE_S,
    show_default=True,
    metavar="SECONDS",
    help="End after so long without a controller.",
)
@token_file_option
def command(
    *, job: str | None, controller: str, listen: str, name: str | None, leave_s: float, token_file: Path | None
) -> None:
    """Speak for many nodes with a job's controller, over one connection. For jobs of thousands of nodes.

    Start one for some hundred nodes, on a machine that may know the job's token: of its nodes it has what a controller
    has. Name it to their agents in front of the controllers. When it ends, its nodes go to the next one that they know
    within 3 s, and come back when it listens again.

    \b
    Examples:
      midstep proxy --job big --controller m0:29400 --token-file job.token
      midstep agent --job big --controller rack7:29410,m0:29400 --token-file job.token

    Exit status: 0 after SIGTERM, 75 when no controller was there for --leave: start it again.
    """
    log_to_stderr(logging.INFO, "%(asctime)s proxy %(levelname)s %(message)s")
    token = full(required(read_token(token_file, os.environ)))
    os.environ.pop(TOKEN_VARIABLE, None)
    of_job = checked_name(job_of(token, job))
    held = claim_free_run_directory(f"{of_job}.proxy")
    try:
        options = ProxyOptions(
            of_job, checked_name(name or host_name()), listen, endpoints(controller), token, held.path / "keys", leave_s
        )
        sys.exit(0 if asyncio.run(_serve(options)) else RESTART_HERE)
    except OSError as error:
        raise ConfigurationError(f"{held.path} cannot be used: {error.strerror}.") from error
    finally:
        held.remove()


async def _serve(options: ProxyOptions) -> bool:
    leaving = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, leaving.set)
    return await Proxy(options).run(leaving)
