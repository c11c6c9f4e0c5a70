"""`midstep page`: serve a page of a job for a browser."""

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ...controller.endpoints.metrics_server import is_loopback
from ...launch.directories import base_directory, jobs
from ...launch.job import POLICY_NAME
from ...launch.reached_job import HereJob, ReachedJob, look, reached
from ...policies.files import load_policy, render
from ...policies.schema import Policy
from ...processor.checkpoints.entries import look_into
from ...processor.checkpoints.files import step_directory
from ...protocol.errors import CheckpointError, ConfigurationError, MidstepError
from ...protocol.identities import Role
from ...protocol.private_files import read_secret
from ...protocol.rank_logs import end_of_log, output_log
from ...protocol.wording import count
from ..bundle import bundle_of
from ..display.plain import echo, log_to_stderr
from ..frame import Command, operator_options
from ..kept_forecast import kept_forecast
from ..orders import ASK_S
from ..what_if import can_create, policy_of
from .jobs import JobAccess, JobList, MeantRole, PagedJobs, meant_role, named_job
from .sections import Checkpoint, Looked
from .sentence import sentence

LISTEN = "127.0.0.1:9410"
NICENESS = 10  # a recovery gets the processor first
_Command = TypeVar("_Command", bound=Callable[..., Any])
MOST_OF_LOG = 64 * 1024
CHECKPOINT_S = 10.0  # between two looks into its directory, which may be on a file server


def token_of(role: Role) -> Callable[[_Command], _Command]:
    """Add the option with the token of those who have a role's buttons."""
    return click.option(
        f"--{role}s-token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=f"The file (mode 600) with what is to be typed in for the buttons of the role {role}.",
    )


@click.command("page", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--listen",
    default=LISTEN,
    show_default=True,
    metavar="[HOST]:PORT",
    help="Where the page is served; with port 0 the system chooses one. Beyond this machine it takes a token and TLS.",
)
@click.option(
    "--viewers-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file (mode 600) with what a viewer has to type in.",
)
@token_of(Role.OPERATOR)
@token_of(Role.ADMIN)
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.VIEWER.value,
    show_default=True,
    help="Print an address with a key in it: who opens that has the buttons of this role. Keep it to yourself.",
)
@click.option(
    "--tls-certificate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The server's certificate with its chain (PEM).",
)
@click.option(
    "--tls-key", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The certificate's key (PEM)."
)
@click.option("--all", "all_jobs", is_flag=True, help="Serve a list of all jobs in $MIDSTEP_HOME, and a page of each.")
@click.option("--until-input-ends", is_flag=True, hidden=True)  # `midstep run --page` holds the other end
@operator_options
def page(
    *,
    job: str | None,
    listen: str,
    all_jobs: bool,
    until_input_ends: bool,
    viewers_token_file: Path | None,
    operators_token_file: Path | None,
    admins_token_file: Path | None,
    role: str,
    tls_certificate: Path | None,
    tls_key: Path | None,
    controller: str | None,
    token_file: Path | None,
) -> None:
    """Serve a page that shows how a job stands, until Ctrl-C: what `midstep status` and `midstep report` say, live.

    It is a process of its own: it asks the controller once a second, and not at all while no page is open. It has
    buttons for those who bring the token of an operator or an admin, or open the address that --role prints; for all
    others it only shows.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. JOB/ROLE is one
    role of a job of several. With --all it is a list of the jobs on this machine, each of which opens. With
    --controller it is the job's whole name, and a token of any role will do.

    \b
    Examples:
      midstep page                    the latest job, at http://127.0.0.1:9410/
      midstep page --role operator    with buttons
      midstep page gpt --listen :0
      midstep page --all              all jobs in one list
      midstep page --controller m0:29400 --token-file viewer.token
      midstep page --listen 10.0.0.5:9410 --viewers-token-file page.token --tls-certificate c.pem --tls-key k.pem
    """
    require_server()
    from . import server

    log_to_stderr(logging.WARNING, "midstep page: %(message)s")
    host, port = host_and_port(listen)
    files = {Role.VIEWER: viewers_token_file, Role.OPERATOR: operators_token_file, Role.ADMIN: admins_token_file}
    tokens = {each: read_secret(file) for each, file in files.items() if file is not None}
    _require_safe(listen, host, tokens, tls_certificate, tls_key)
    if all_jobs:
        if job is not None or controller is not None:
            raise click.UsageError("--all is for the jobs on this machine: leave out JOB and --controller.")
        served, line = _of_all()
    else:
        served, line = _of_one(job, reached(job, controller, token_file), {*tokens, Role(role)})
    key = "" if role == Role.VIEWER else secrets.token_urlsafe(24)
    viewers, closed = tokens.pop(Role.VIEWER, ""), not is_loopback(host)
    others = (*tokens.items(), *([(Role(role), key)] if key else []))
    place = server.PagePlace(host, port, viewers, _text(tls_certificate), _text(tls_key), others, closed)
    with server.listening(place) as listener:
        if not until_input_ends:
            echo(line)
        _say_where(server.address(place, listener), role, key, until_input_ends)
        os.nice(NICENESS)
        server.serve(served, place, listener, _input_ends() if until_input_ends else None)


def _of_one(name: str | None, target: ReachedJob, roles: set[Role]) -> tuple[PagedJobs, str]:
    """Return what serves one job, and how it stands. Raises MidstepError, so that a wrong name is said at once."""
    _require_reach(target, roles)
    access = access_to(target, meant_role(name, target))
    first = access.look()
    return PagedJobs(access), f"{first.status.job}: {sentence(first.status, first.note, first.whole).text}"


def _of_all() -> tuple[PagedJobs, str]:
    base = base_directory()
    many = len(jobs(base))

    def find(name: str) -> JobAccess:
        target = named_job(name, base)
        return access_to(target, meant_role(name, target))

    return PagedJobs(None, find=find, listing=JobList(base)), f"{count(many, 'job')} in {base}"


def access_to(target: ReachedJob, role: MeantRole | None = None) -> JobAccess:
    """Return what the page asks of a job. `role`: which one it is of a job of several, to be found again each time."""
    if role is not None:
        return _access(role_looker(role), role.present, log_of(role.present))
    log = log_of(lambda: target) if isinstance(target, HereJob) else None  # none of its logs can be here
    return _access(looker(target), lambda: target, log)


def _access(
    look_at: Callable[[], Looked], present: Callable[[], ReachedJob], log: Callable[[int, int], str] | None
) -> JobAccess:
    """Return what the page asks of the job that is there at each request."""
    return JobAccess(look_at, lambda request: present().ask(request, ASK_S), lambda: bundle_of(present()), log)


def role_looker(role: MeantRole) -> Callable[[], Looked]:
    """Return what looks at a role as it stands: also at the one that has begun again with all others."""
    target = role.present()
    look_at = looker(target)

    def look_again() -> Looked:
        nonlocal target, look_at
        present = role.present()
        if present != target:
            target, look_at = present, looker(present)
        return msgspec.structs.replace(look_at(), whole=role.whole())

    return look_again


def _say_where(at: str, role: str, key: str, with_job: bool) -> None:
    echo(f"the page is at {at} until {'the job ends' if with_job else 'Ctrl-C'}")
    if key:
        echo(f"with the buttons of an {role}: {at}login#{key}")


def _input_ends() -> threading.Event:
    """Return what is set when standard input ends, as it does when the process at its other end has gone."""
    ended = threading.Event()

    def wait() -> None:
        while sys.stdin.buffer.read(1):
            pass
        ended.set()

    threading.Thread(target=wait, name="input", daemon=True).start()
    return ended


def require_server() -> None:
    """Raise ConfigurationError where the libraries are missing that serve a page."""
    try:
        from . import server  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"a page needs starlette and uvicorn ({error}): pip install 'midstep[operator]'."
        ) from error


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)


def host_and_port(listen: str) -> tuple[str, int]:
    """Return what an address to listen at means. Raises ConfigurationError."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or not int(port) < 65536:
        raise ConfigurationError(f"--listen {listen}: write HOST:PORT, as {LISTEN}, or :9410.")
    return host.strip("[]") or "127.0.0.1", int(port)


def _require_reach(target: ReachedJob, roles: set[Role]) -> None:
    """Refuse buttons that the page's own token has no right to. Raises ConfigurationError."""
    if isinstance(target, HereJob):
        return
    beyond = [role for role in roles if not target.token.role.covers(role)]
    if beyond:
        most = max(beyond, key=list(Role).index)
        raise ConfigurationError(
            f"the page itself comes with a token of the role {target.token.role}, so nobody can be {most} on it. "
            f"Start it with a --token-file of that role (`midstep token --role {most}`)."
        )


def _require_safe(listen: str, host: str, tokens: dict[Role, str], certificate: Path | None, key: Path | None) -> None:
    """Refuse a page that strangers could read. Raises ConfigurationError."""
    if (certificate is None) != (key is None):
        raise ConfigurationError("--tls-certificate and --tls-key go together: give both files.")
    for file in (certificate, key):
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigurationError(f"{file}: it cannot be read. Name a PEM file that you may read.")
    if len(set(tokens.values())) < len(tokens):
        raise ConfigurationError("each role has to have a token of its own: two of the files are the same.")
    if is_loopback(host):
        return
    if not tokens or certificate is None:
        raise ConfigurationError(
            f"--listen {listen}: others than this machine would read the page. Listen at 127.0.0.1 and come by "
            "`ssh -L`, or give --viewers-token-file, or that of another role, --tls-certificate and --tls-key."
        )


def looker(target: ReachedJob) -> Callable[[], Looked]:
    """Return what looks at a job. It raises MidstepError when nothing can be read."""
    directory = target.directory if isinstance(target, HereJob) else None
    policy, checkpoints = (None, None) if directory is None else _policy_and_checkpoints(directory)
    text, can_create_nodes = "" if policy is None else render(policy), can_create(target)
    newest: Checkpoint | None = None
    next_s = 0.0
    told = -1  # how many changes of the policy are in its text

    def look_at() -> Looked:
        nonlocal newest, next_s, policy, text, told
        status, note = look(target)
        if not note and told != status.policy_changes:
            with contextlib.suppress(MidstepError):  # it is asked again at the next look
                policy = policy_of(target, is_live=True)
                text, told = render(policy), status.policy_changes
        if checkpoints is not None and time.monotonic() >= next_s:
            newest, next_s = _newest(checkpoints), time.monotonic() + CHECKPOINT_S
        return Looked(status, note, text, newest, policy, can_create_nodes, told, kept_forecast(target))

    return look_at


def _policy_and_checkpoints(directory: Path) -> tuple[Policy | None, Path | None]:
    """Return the policy that a job was started with, and where its checkpoints lie; None where it cannot be read."""
    try:
        policy = load_policy(directory / POLICY_NAME)
    except (MidstepError, OSError):
        return None, None
    return policy, directory / (policy.checkpoint.directory or "checkpoints")


def log_of(present: Callable[[], HereJob]) -> Callable[[int, int], str]:
    """Return what reads the end of what a process of a rank has printed, by the numbers of rank and process."""

    def read(rank: int, incarnation: int) -> str:
        return end_of_log(output_log(str(present().directory), rank, incarnation), MOST_OF_LOG)

    return read


def _newest(checkpoints: Path) -> Checkpoint | None:
    try:
        complete = look_into(checkpoints, most=1).complete
        if not complete:
            return None
        return Checkpoint(complete[-1], step_directory(checkpoints, complete[-1]).stat().st_mtime)
    except (CheckpointError, OSError):
        return None
