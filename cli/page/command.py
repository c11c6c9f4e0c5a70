"""`midstep page`: serve a page of a job for a browser."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click

from ...controller.endpoints.metrics_server import is_loopback
from ...launch.job import POLICY_NAME
from ...launch.reached_job import HereJob, ReachedJob, look, reached
from ...policies.files import load_policy, render
from ...processor.checkpoints.entries import look_into
from ...processor.checkpoints.files import step_directory
from ...protocol.errors import CheckpointError, ConfigurationError, MidstepError
from ...protocol.private_files import read_secret
from ..display.plain import echo, log_to_stderr
from ..frame import Command, operator_options
from .sections import Checkpoint, Looked
from .sentence import sentence

LISTEN = "127.0.0.1:9410"
NICENESS = 10  # a recovery gets the processor first
CHECKPOINT_S = 10.0  # between two looks into its directory, which may be on a file server


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
@click.option(
    "--tls-certificate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The server's certificate with its chain (PEM).",
)
@click.option(
    "--tls-key", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The certificate's key (PEM)."
)
@click.option("--until-input-ends", is_flag=True, hidden=True)  # `midstep run --page` holds the other end
@operator_options
def page(
    *,
    job: str | None,
    listen: str,
    until_input_ends: bool,
    viewers_token_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    controller: str | None,
    token_file: Path | None,
) -> None:
    """Serve a page that shows how a job stands, until Ctrl-C: what `midstep status` and `midstep report` say, live.

    It only looks, as a process of its own: it asks the controller once a second, and not at all while no page is open.
    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. JOB/ROLE is one
    role of a job of several. With --controller it is the job's whole name, and a token of any role will do.

    \b
    Examples:
      midstep page                    the latest job, at http://127.0.0.1:9410/
      midstep page gpt --listen :0
      midstep page --controller m0:29400 --token-file viewer.token
      midstep page --listen 10.0.0.5:9410 --viewers-token-file page.token --tls-certificate c.pem --tls-key k.pem
    """
    require_server()
    from . import server

    log_to_stderr(logging.WARNING, "midstep page: %(message)s")
    host, port = host_and_port(listen)
    token = "" if viewers_token_file is None else read_secret(viewers_token_file)
    _require_safe(listen, host, token, tls_certificate, tls_key)
    look_at = looker(reached(job, controller, token_file))
    first = look_at()  # a wrong name or token is said now, and not to a browser
    place = server.PagePlace(host, port, token, _text(tls_certificate), _text(tls_key))
    with server.listening(place) as listener:
        said = sentence(first.status, first.note)
        if not until_input_ends:
            echo(f"{first.status.job}: {said.text}")
        echo(
            f"the page is at {server.address(place, listener)} until {'the job ends' if until_input_ends else 'Ctrl-C'}"
        )
        os.nice(NICENESS)
        server.serve(look_at, place, listener, _input_ends() if until_input_ends else None)


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


def _require_safe(listen: str, host: str, token: str, certificate: Path | None, key: Path | None) -> None:
    """Refuse a page that strangers could read. Raises ConfigurationError."""
    if (certificate is None) != (key is None):
        raise ConfigurationError("--tls-certificate and --tls-key go together: give both files.")
    for file in (certificate, key):
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigurationError(f"{file}: it cannot be read. Name a PEM file that you may read.")
    if is_loopback(host):
        return
    if not token or certificate is None:
        raise ConfigurationError(
            f"--listen {listen}: others than this machine would read the page. Listen at 127.0.0.1 and come by "
            "`ssh -L`, or give --viewers-token-file, --tls-certificate and --tls-key."
        )


def looker(target: ReachedJob) -> Callable[[], Looked]:
    """Return what looks at a job. It raises MidstepError when nothing can be read."""
    directory = target.directory if isinstance(target, HereJob) else None
    policy, checkpoints = ("", None) if directory is None else _policy_and_checkpoints(directory)
    newest: Checkpoint | None = None
    next_s = 0.0

    def look_at() -> Looked:
        nonlocal newest, next_s
        status, note = look(target)
        if checkpoints is not None and time.monotonic() >= next_s:
            newest, next_s = _newest(checkpoints), time.monotonic() + CHECKPOINT_S
        return Looked(status, note, policy, newest)

    return look_at


def _policy_and_checkpoints(directory: Path) -> tuple[str, Path | None]:
    """Return the text of a job's policy, and where its checkpoints lie; nothing where it cannot be read."""
    try:
        policy = load_policy(directory / POLICY_NAME)
    except (MidstepError, OSError):
        return "", None
    return render(policy), directory / (policy.checkpoint.directory or "checkpoints")


def _newest(checkpoints: Path) -> Checkpoint | None:
    try:
        complete = look_into(checkpoints, most=1).complete
        if not complete:
            return None
        return Checkpoint(complete[-1], step_directory(checkpoints, complete[-1]).stat().st_mtime)
    except (CheckpointError, OSError):
        return None
