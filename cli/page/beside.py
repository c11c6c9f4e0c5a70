"""The page of a job that `midstep run` and `midstep demo` start with it, and that ends with them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from ...controller.endpoints.metrics_server import is_loopback
from ...protocol.errors import ConfigurationError
from ...protocol.identities import Role
from ...protocol.own_programs import own_program
from ...protocol.token import CONTROLLER_VARIABLE, without_token
from .command import host_and_port, require_server

ANY_PORT = "127.0.0.1:0"
END_S = 5.0  # for a page to end
_Command = TypeVar("_Command", bound=Callable[..., Any])


def page_option(without: str | None = None) -> Callable[[_Command], _Command]:
    """Add --page to a command that runs a job. `without`: the place that --page means without a value; None: none."""
    optional: dict[str, Any] = {} if without is None else {"is_flag": False, "flag_value": without}
    return click.option(
        "--page",
        metavar="[HOST]:PORT" if without is None else "[[HOST]:PORT]",
        help="Serve a page of the job on this machine meanwhile, by `midstep page` (docs/page.md); with port 0"
        + (", or without one, the system chooses one." if optional else " the system chooses one."),
        **optional,
    )


@contextlib.contextmanager
def page_beside(directory: Path, listen: str | None, role: Role = Role.VIEWER) -> Iterator[None]:
    """Serve the page of a job from a process that ends with this one; no page without `listen`.

    `role`: whose buttons those have who open the address that is printed.

    Raises ConfigurationError for a place beyond this machine.
    """
    if listen is None:
        yield
        return
    environment = without_token(os.environ)
    environment.pop(CONTROLLER_VARIABLE, None)  # of a job elsewhere
    words = [*own_program("midstep.cli.main"), "page", str(directory), "--listen", listen, "--role", role]
    with subprocess.Popen(
        [*words, "--until-input-ends"],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),
        env=environment,
        start_new_session=True,  # Ctrl-C ends the job, and the page with it
    ) as process:
        assert process.stdin is not None
        try:
            yield
        finally:
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:  # it is frozen, perhaps
                process.kill()


def require_here(listen: str | None) -> None:
    """Refuse an address beyond this machine, or a missing library; None: no page. Raises ConfigurationError."""
    if listen is None:
        return
    require_server()
    host, _ = host_and_port(listen)
    if not is_loopback(host):
        raise ConfigurationError(
            f"--page {listen}: it is for this machine only. `midstep page --listen {listen}` serves others, with a "
            "token and TLS."
        )
