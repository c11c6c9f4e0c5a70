"""`midstep platform`: what makes a job's nodes, as a process of its own beside the job's controllers."""

import asyncio
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import click

from ..launch.directories import checked_name
from ..launch.job import required
from ..platforms.base import PlatformContext, PlatformFactory, platform_check, platform_factory
from ..platforms.peer import PlatformPeer, keys_from
from ..protocol.discovery import endpoints
from ..protocol.errors import ConfigurationError
from ..protocol.identities import Role
from ..protocol.token import TOKEN_VARIABLE, FullToken, full, job_of, read_token
from .display.plain import log_to_stderr
from .ended_incidents import ended_incidents
from .frame import Command, token_file_option
from .standing_by import LEAVE_S, LEFT, until_one_leads


@click.command("platform", cls=Command)
@click.argument("name")
@click.option("--job", metavar="NAME", help="The job that the nodes are for.  [default: the one that the token names]")
@click.option("--controller", metavar="HOST:PORT[,...]", help="Where the job's controllers listen.")
@token_file_option
@click.option(
    "-o", "--option", "given", multiple=True, metavar="KEY=VALUE", help="An option of the platform. Repeatable."
)
@click.option(
    "--standby",
    is_flag=True,
    help="Wait for as long as no controller that listens there leads. Leave, to be started again, "
    "when the one that was served has been away for 10 s. For a platform beside each of several controllers.",
)
@click.option("--check", is_flag=True, help="Only say whether it has what it needs, such as rights, and end.")
def command(
    *,
    name: str,
    job: str | None,
    controller: str | None,
    token_file: Path | None,
    given: tuple[str, ...],
    standby: bool,
    check: bool,
) -> None:
    """Make, end and watch the nodes of a job, as its controller orders, on the platform NAME.

    For a job of `midstep submit --platform NAME`. It ends with the job, and then its nodes are gone, too. If it is
    ended before (SIGTERM, exit code 75) the nodes stay: start it again, and it finds them.

    Platforms are midstep's own and those of other packages; see docs/platforms.md for how to write one.
    """
    log_to_stderr(logging.INFO, f"%(asctime)s platform {name} %(levelname)s %(message)s")
    token = full(required(read_token(token_file, os.environ)))
    os.environ.pop(TOKEN_VARIABLE, None)
    of_job = checked_name(job_of(token, job))
    if check:
        asyncio.run(_check(name, of_job, token, _options(given)))
        return
    if controller is None:
        raise ConfigurationError("the platform needs --controller: where the job's controllers listen.")
    context = PlatformContext(of_job, endpoints(controller), token, _options(given), lambda report: None)
    sys.exit(asyncio.run(_host(platform_factory(name), context, standby=standby)))


async def _check(name: str, job: str, token: FullToken, chosen: dict[str, str]) -> None:
    check = platform_check(name)
    if check is not None:
        await check(PlatformContext(job, (), token, chosen, lambda report: None))


async def _host(factory: PlatformFactory, context: PlatformContext, *, standby: bool) -> int:
    """Run a platform until its job is over; return the exit code."""
    leaving = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, leaving.set)
    if standby:
        viewer = context.token.for_role(context.job, Role.VIEWER)
        await _first(leaving.wait(), until_one_leads(context.controllers, viewer))
        if leaving.is_set():
            return LEFT
    leave_s = LEAVE_S if standby else float("inf")
    peer = PlatformPeer(context.job, context.controllers, keys_from(context.token, context.job), leave_s=leave_s)
    try:
        incidents = ended_incidents(context.job, context.controllers, context.token)
        platform = factory(dataclasses.replace(context, post=peer.post, incidents=incidents))
        peer.serve(platform)
        peer.introduce()
        await _first(peer.ended.wait(), peer.absent.wait(), leaving.wait())
        if not peer.ended.is_set():
            return LEFT
        await platform.close()
        return 0
    finally:
        await peer.close()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them has ended, and end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _options(given: Sequence[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for each in given:
        key, separator, value = each.partition("=")
        if not separator or not key:
            raise ConfigurationError(f"--option {each!r} is not KEY=VALUE.")
        chosen[key] = value
    return chosen
