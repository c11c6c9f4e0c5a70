"""Which job an operator's command is for: one whose files are here, or one that a controller elsewhere leads."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ..controller.endpoints.control_requests import Reply, Request
from ..controller.endpoints.local_sockets import NoController, ask
from ..controller.endpoints.operator_client import ask_from_elsewhere
from ..launch.jobs.directories import checked_name, find_job
from ..launch.jobs.job_file import run_directory_of
from ..protocol.controller_addresses import endpoints
from ..protocol.errors import ConfigurationError
from ..protocol.secret_files import read_token
from ..protocol.token import RoleToken, job_of, operating

CONTROLLER_VARIABLE = "MIDSTEP_CONTROLLER"
TOKEN_FILE_VARIABLE = "MIDSTEP_TOKEN_FILE"
ELSEWHERE_S = 10.0  # a way between machines, and a controller that comes up meanwhile

_Command = TypeVar("_Command", bound=Callable[..., Any])


def live_directory(job_directory: Path) -> Path:
    """Return the run directory of a job. Raises NoController if it never had one."""
    run_directory = run_directory_of(job_directory)
    if run_directory is None:
        raise NoController(f"{job_directory}: the job has not been started. Start it with `midstep run`.")
    return run_directory


class HereJob(msgspec.Struct, frozen=True):
    """A job whose directory is on this machine."""

    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.directory.name

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Ask its controller. Raises NoController, MidstepError."""
        return ask(live_directory(self.directory), request, timeout_s)


class JobElsewhere(msgspec.Struct, frozen=True):
    """A job that is known by where its controllers listen, and a token."""

    endpoints: tuple[str, ...]
    token: RoleToken

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.token.job

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Ask its controller. Raises NotAdmitted, NoController, MidstepError."""
        return ask_from_elsewhere(self.endpoints, self.token, request, max(timeout_s, ELSEWHERE_S))


ReachedJob = HereJob | JobElsewhere


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


def reached(job: str | None, controller: str | None, token_file: Path | None) -> ReachedJob:
    """Return the job that is meant. `controller`, `token_file`: as given; else the environment has them.

    Raises ConfigurationError.
    """
    return reached_from_elsewhere(job, controller, token_file) or HereJob(find_job(job))


def reached_from_elsewhere(job: str | None, controller: str | None, token_file: Path | None) -> JobElsewhere | None:
    """Return a job that a controller elsewhere leads; None if none is named. `job`: its whole name.

    Raises ConfigurationError.
    """
    where = controller or os.environ.get(CONTROLLER_VARIABLE)
    if where:
        return _elsewhere(job, where, token_file)
    if token_file is not None:
        raise ConfigurationError(f"--token-file goes with --controller HOST:PORT, or {CONTROLLER_VARIABLE}.")
    return None


def _elsewhere(job: str | None, controller: str, token_file: Path | None) -> JobElsewhere:
    in_environment = os.environ.get(TOKEN_FILE_VARIABLE)
    file = token_file or (Path(in_environment) if in_environment else None)
    token = read_token(file, os.environ)
    if token is None:
        raise ConfigurationError(
            f"a controller on another machine asks for a token: --token-file FILE, {TOKEN_FILE_VARIABLE}, or its text "
            "in MIDSTEP_TOKEN. Whoever has the job's token makes one: `midstep token --role viewer`."
        )
    if job is None and not token.job:
        raise ConfigurationError("this token is for any job that was started with it: write the job's whole name.")
    return JobElsewhere(endpoints(controller), operating(token, checked_name(job_of(token, job))))
