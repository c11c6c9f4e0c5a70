"""`midstep controller`: the controller process of one job. `midstep run` starts it, and starts it again if it dies."""

import contextlib
import logging
import os
import sys
from pathlib import Path

import click

from ..controller.election.file_election import LEASE_S
from ..launch.controller_place import Given, in_directories, in_store
from ..protocol.errors import JournalDamaged, MidstepError
from ..protocol.exits import CONTROLLER_FAILED, JOURNAL_DAMAGED, leave_to_launcher
from ..protocol.token import read_token
from .display.plain import echo, log_to_stderr
from .frame import metrics_options, store_option, token_file_option
from .numbers import DESCRIPTOR, seconds


@click.command("controller")
@click.option(
    "--job-dir",
    "job_directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="The job directory, with the journal that `midstep run` or `midstep submit` founded.  [default with --store: "
    "~/.midstep/jobs/JOB]",
)
@click.option(
    "--run-dir",
    "run_directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where sockets and keys are. Owner-only, on this machine, with a short path.  [default with --store, or with "
    "the job's token: made, and removed at the end]",
)
@store_option()
@click.option("--job", metavar="NAME", help="The job in the store.  [default: the one that the token names]")
@click.option(
    "--listen",
    default="tcp://127.0.0.1:0",
    show_default=True,
    metavar="ENDPOINT",
    help="Where agents connect. Port 0: the port of this job's last controller, else any; see controller.endpoint.",
)
@click.option(
    "--keys",
    "keys_directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="The job's keys.  [default: keys in the run directory]",
)
@token_file_option
@click.option(
    "--wait",
    "wait_s",
    type=seconds(),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Stand by this long for another controller of the job to end; then give up.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="Stand by without a limit of time, and take over when the active controller ends or shows no sign of life.",
)
@click.option(
    "--lease",
    "lease_s",
    type=seconds(1),
    default=LEASE_S,
    show_default=True,
    metavar="SECONDS",
    help="With --standby: how long the active controller may be silent. One that is frozen is deposed after that.",
)
@click.option("--name", help="What this controller is called in `midstep status`.  [default: controller-PID]")
@click.option(
    "--stop",
    metavar="REASON",
    help="Stop the job, with a checkpoint where that is possible, unless it is being stopped already.",
)
@click.option(
    "--in-memory",
    is_flag=True,
    help="Work on a copy of a journal that cannot be written. Only to stop a job: what is recorded is lost.",
)
@metrics_options
@click.option("--keepalive-fd", type=DESCRIPTOR, help="Write a byte to this inherited pipe at least each second.")
@click.option("--verbose", is_flag=True, help="Log every refused message, too.")
def command(
    *,
    job_directory: Path | None,
    run_directory: Path | None,
    store: str | None,
    job: str | None,
    listen: str,
    keys_directory: Path | None,
    token_file: Path | None,
    wait_s: float,
    standby: bool,
    lease_s: float,
    name: str | None,
    stop: str | None,
    in_memory: bool,
    metrics_listen: str | None,
    metrics_token_file: Path | None,
    keepalive_fd: int | None,
    verbose: bool,
) -> None:
    """Run the controller of a job. You need this only to start one by hand; `midstep run` does it for you.

    It loads the job's journal, takes over with a new term, and continues where the last controller ended. When the
    job is over, its exit code is this command's. Exit code 70: the controller failed, or another one leads by now, and
    the job may be running; start another one. Exit code 65: the journal is damaged, and no controller can continue.
    Logs go to stderr.

    With the job's token, nodes can join by themselves (`midstep agent`). Without one it listens on this machine only.
    Several may be started with --standby: one is active (hot), the others stand by (cold); see docs/controllers.md.
    With --store they may be on several machines, and the job is one that `midstep submit` has put there.
    """
    from ..controller.endpoints.metrics_server import metrics_place
    from ..controller.keepalive import KeepAlive
    from ..controller.opening import Term
    from ..controller.service import serve
    from .story import STORY_PROGRAM

    if in_memory and (stop is None or store is not None):
        raise click.UsageError("--in-memory is for stopping a job with a journal in a file: give --stop REASON, too.")
    leave_to_launcher(os.environ)
    log_to_stderr(logging.DEBUG if verbose else logging.INFO, "%(asctime)s controller %(levelname)s %(message)s")
    try:
        with contextlib.ExitStack() as stack:
            token = read_token(token_file, os.environ)
            given = Given(job, token, token_file, keys_directory, job_directory, run_directory, listen)
            exit_code = serve(
                in_directories(stack, given) if store is None else in_store(stack, store, given),
                term=Term(None if standby else wait_s, lease_s if standby else None, stop, in_memory, name),
                alive=KeepAlive(keepalive_fd),
                story_program=STORY_PROGRAM,
                metrics=None if not metrics_listen else metrics_place(metrics_listen, metrics_token_file),
            )
    except MidstepError as error:
        echo(f"midstep controller: {error}", err=True)
        sys.exit(JOURNAL_DAMAGED if isinstance(error, JournalDamaged) else CONTROLLER_FAILED)
    sys.exit(exit_code)
