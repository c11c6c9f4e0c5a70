"""`midstep agent`: the agent of one node, as platforms and the launchers of engines start it."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from ..agent.main import GRACE_S, AgentOptions, read_program, serve
from ..launch.directories import base_directory, checked_name, claim_free_run_directory
from ..launch.meeting import JOIN_S, Wishes, admitted
from ..protocol import environment as names
from ..protocol.discovery import endpoints
from ..protocol.errors import ConfigurationError, MidstepError, NotAdmitted
from ..protocol.exits import NOT_ADMITTED, AgentEnd, leave_to_launcher, write_agent_end
from ..protocol.private_files import make_private_directory
from ..protocol.token import TOKEN_VARIABLE, Invitation, job_of, joinable, read_token
from .display.log_follower import RankOutput
from .display.plain import echo, log_to_stderr
from .frame import proxy_option, token_file_option
from .numbers import DESCRIPTOR, SESSION, seconds

_LOOPBACK = "127.0.0.1"
_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command("agent")
@click.option("--job", metavar="NAME", help="The job that the node works for.  [default: the one that the token names]")
@click.option(
    "--controller",
    required=True,
    metavar="HOST:PORT[,...]",
    help="Where the job's controllers listen.",
)
@proxy_option
@click.option("--node", metavar="NAME", help="The node's name.  [default: the host's, with a number if that is in use]")
@token_file_option
@click.option("--keys", type=_DIRECTORY, help="Directory with keys that were made for the node, instead of a token.")
@click.option(
    "--run-dir",
    "run_directory",
    type=_DIRECTORY,
    help="Directory for the node's socket; its path must be short.  [default: made, and removed at the end]",
)
@click.option(
    "--log-dir",
    "log_directory",
    type=_DIRECTORY,
    help="Directory in which the ranks' logs are made, in `logs`.  [default with a token: ~/.midstep/jobs/JOB@NODE]",
)
@click.option("--failure-domain", default="", metavar="NAME", help="What fails together.  [default: the host]")
@click.option("--host", metavar="ADDRESS", help="Address under which other nodes reach this one.  [default: found out]")
@click.option(
    "--join-timeout",
    "limit_s",
    type=seconds(1),
    default=JOIN_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to try to reach a controller, with a token.",
)
@click.option(
    "--grace",
    "grace_s",
    type=seconds(),
    default=GRACE_S,
    show_default=True,
    metavar="SECONDS",
    envvar=names.GRACE_S,
    help="From SIGTERM to SIGKILL on this machine: the time that its ranks have to move to another. With a token.",
)
@click.option("--show-output", is_flag=True, help="Show what the ranks of this node print, on stdout. With a token.")
@click.option("--life-fd", type=DESCRIPTOR, help="End when this inherited pipe is closed at its other end.")
@click.option("--outlived", is_flag=True, hidden=True, help="The controller does not end with --life-fd.")
@click.option(
    "--session", type=SESSION, default=0, hidden=True, help="A number above that of earlier agents of the name."
)
@click.option("--program", type=click.Path(dir_okay=False, path_type=Path), hidden=True, help="This machine's command.")
def command(
    *,
    job: str | None,
    controller: str,
    proxies: tuple[str, ...],
    node: str | None,
    token_file: Path | None,
    keys: Path | None,
    run_directory: Path | None,
    log_directory: Path | None,
    failure_domain: str,
    host: str | None,
    limit_s: float,
    grace_s: float,
    show_output: bool,
    life_fd: int | None,
    outlived: bool,
    session: int,
    program: Path | None,
) -> None:
    """Start and watch training processes on this node, as the job's controller says, until the job ends.

    With the job's token the node joins by itself: it makes its own keys, and the controller gives it a name. Everything
    that the agent has started ends with it, even when it is killed.

    The exit code is the job's: 0 when it ended well. 75: there was no controller for `agent.leave_s`. 76: the job does
    not want this node any more; start an agent on another one. 77: the controller does not admit this node. Of a node
    that was a spare for `agent.spare_s` it is 0, too.
    """
    leave_to_launcher(os.environ)
    log_to_stderr(logging.INFO, f"%(asctime)s {node or 'agent'} %(levelname)s %(message)s")
    wishes = Wishes(node or "", failure_domain, host or "", proxies)
    try:
        if keys is not None:
            if job is None or node is None or run_directory is None:
                raise click.UsageError("--keys needs --job, --node and --run-dir.")
            options = _with_keys(keys, job, endpoints(controller)[0], wishes, run_directory)
            options = msgspec.structs.replace(options, life_fd=life_fd, outlived=outlived, session=session)
            sys.exit(asyncio.run(serve(options)))
        invitation = _invitation(token_file, job)
        own = None if program is None else read_program(program)
        with _run_directory(run_directory, invitation.job) as place:
            options = admitted(endpoints(controller), invitation, wishes, place, limit_s=limit_s, life_fd=life_fd)
            logs = (log_directory or base_directory() / f"{options.job}@{options.node}").absolute()
            make_private_directory(logs / "logs")
            options = msgspec.structs.replace(options, program=own, log_directory=str(logs), grace_s=grace_s)
            with RankOutput(logs / "logs") if show_output else contextlib.nullcontext():
                exit_code = asyncio.run(serve(options))
            sys.exit(exit_code)
    except NotAdmitted as error:
        echo(f"midstep agent: {error}", err=True)
        _leave_word(run_directory, NOT_ADMITTED, error)
        sys.exit(NOT_ADMITTED)
    except (MidstepError, OSError) as error:
        _leave_word(run_directory, 1, error)
        raise click.ClickException(str(error)) from error


def _invitation(token_file: Path | None, job: str | None) -> Invitation:
    token = read_token(token_file, os.environ)
    os.environ.pop(TOKEN_VARIABLE, None)  # not for the ranks
    if token is None:
        raise ConfigurationError(
            "an agent needs the job's token: --token-file, or MIDSTEP_TOKEN. `midstep token` makes one."
        )
    return joinable(token).invitation(checked_name(job_of(token, job)))


def _with_keys(keys: Path, job: str, controller: str, wishes: Wishes, run_directory: Path) -> AgentOptions:
    return AgentOptions(
        job=job,
        node=wishes.node,
        controller=controller,
        keys=str(keys),
        run_directory=str(run_directory.resolve()),
        failure_domain=wishes.failure_domain,
        host=wishes.host or _LOOPBACK,
    )


def _leave_word(run_directory: Path | None, exit_code: int, error: Exception) -> None:
    if run_directory is not None:
        write_agent_end(run_directory, AgentEnd(exit_code, str(error)))


@contextlib.contextmanager
def _run_directory(given: Path | None, job: str) -> Iterator[Path]:
    """Return where the node's socket and keys lie; what is made for it is removed in the end."""
    if given is not None:
        yield given.resolve()
        return
    held = claim_free_run_directory(f"{job}.agent")
    try:
        yield held.path
    finally:
        held.remove()


if __name__ == "__main__":
    command()
