"""`midstep platform`: what makes a job's nodes, as a process of its own beside the job's controllers."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ..platforms.base import PlatformContext, PlatformFactory
from ..platforms.peer import PlatformPeer, keys_from
from ..platforms.registry import platform_check, platform_factory
from ..protocol.errors import ConfigurationError, MidstepError
from ..protocol.secret_files import read_token
from ..protocol.token import TOKEN_VARIABLE, FullToken, full, job_of
from .display.plain import log_to_stderr
from .ended_incidents import ended_incidents
from .jobs.directories import checked_name
from .joining.endpoints import endpoints
from .joining.opening import required
from .token import token_file_option

LEFT = 75  # the job has not ended: start it again


@click.command("platform")
@click.argument("name")
@click.option("--job", metavar="NAME", help="The job that the nodes are for.  [default: the one that the token names]")
@click.option("--controller", metavar="HOST:PORT[,...]", help="Where the job's controllers listen.")
@token_file_option
@click.option(
    "-o", "--option", "given", multiple=True, metavar="KEY=VALUE", help="An option of the platform. Repeatable."
)
@click.option("--check", is_flag=True, help="Only say whether it has what it needs, such as rights, and end.")
def command(
    *,
    name: str,
    job: str | None,
    controller: str | None,
    token_file: Path | None,
    given: tuple[str, ...],
    check: bool,
) -> None:
    """Make, end and watch the nodes of a job, as its controller orders, on the platform NAME.

    For a job of `midstep submit --platform NAME`. It ends with the job, and then its nodes are gone, too. If it is
    ended before (SIGTERM, exit code 75) the nodes stay: start it again, and it finds them.

    Platforms are midstep's own and those of other packages; see docs/platforms.md for how to write one.
    """
    log_to_stderr(logging.INFO, f"%(asctime)s platform {name} %(levelname)s %(message)s")
    try:
        token = full(required(read_token(token_file, os.environ)))
        os.environ.pop(TOKEN_VARIABLE, None)
        of_job = checked_name(job_of(token, job))
        if check:
            asyncio.run(_check(name, of_job, token, _options(given)))
            return
        if controller is None:
            raise ConfigurationError("the platform needs --controller: where the job's controllers listen.")
        factory = platform_factory(name)
        sys.exit(asyncio.run(_host(factory, of_job, endpoints(controller), token, _options(given))))
    except MidstepError as error:
        raise click.ClickException(str(error)) from error


async def _check(name: str, job: str, token: FullToken, chosen: dict[str, str]) -> None:
    check = platform_check(name)
    if check is not None:
        await check(PlatformContext(job, (), token, chosen, lambda report: None))


async def _host(
    factory: PlatformFactory, job: str, controllers: Sequence[str], token: FullToken, chosen: dict[str, str]
) -> int:
    """Run a platform until its job is over; return the exit code."""
    peer = PlatformPeer(job, controllers, keys_from(token, job))
    try:
        incidents = ended_incidents(job, controllers, token)
        platform = factory(PlatformContext(job, tuple(controllers), token, chosen, peer.post, incidents))
        peer.serve(platform)
        peer.introduce()
        leaving = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, leaving.set)
        waits = [asyncio.ensure_future(event.wait()) for event in (peer.ended, leaving)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not peer.ended.is_set():
            return LEFT
        await platform.close()
        return 0
    finally:
        await peer.close()


def _options(given: Sequence[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for each in given:
        key, separator, value = each.partition("=")
        if not separator or not key:
            raise ConfigurationError(f"--option {each!r} is not KEY=VALUE.")
        chosen[key] = value
    return chosen
