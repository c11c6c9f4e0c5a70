"""`midstep status`: how a job stands, from its controller, or from its journal when there is none."""

import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from ..launch.reached_job import (
    ReachedJob,
    look,
    reached,
)
from ..protocol.errors import MidstepError
from ..protocol.incidents import JobStatus
from .control import operator_options
from .display.plain import echo, echo_json
from .numbers import seconds


@click.command("status")
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, one line each time.")
@click.option("--watch", is_flag=True, help="Refresh it until the job has ended, or Ctrl-C.")
@click.option(
    "--every",
    "every_s",
    type=seconds(0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch looks.",
)
@operator_options
def command(
    *, job: str | None, as_json: bool, watch: bool, every_s: float, controller: str | None, token_file: Path | None
) -> None:
    """Show how a job stands: phase, ranks, nodes, budgets, incidents; of a job of several roles, a line for each.

    Asks the job's controller. If none answers (the job has ended, or its controller hangs or is being restarted), the
    job's journal is read instead, and it is said why.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. JOB/ROLE is one
    role of a job of several. Jobs are looked for in $MIDSTEP_HOME, or in ~/.midstep/jobs. With --controller it is the
    job's whole name, nothing of the job has to be on this machine, and a token of any role will do.

    \b
    Examples:
      midstep status                  the latest job
      midstep status demo --watch     refresh until the job ends
      midstep status --json | jq .phase
      midstep status --controller m0:29400 --token-file viewer.token
    """
    from ..launch.reached_job import group_meant
    from .roles_shown import show_group

    try:
        directory = group_meant(job, controller)
        if directory is not None:
            show_group(directory, as_json=as_json, every_s=every_s if watch else None)
            return
        target = reached(job, controller, token_file)
        if watch:
            _watch(target, as_json, every_s)
            return
        status, note = look(target)
        if as_json:
            echo_json(as_data(status, note))
        else:
            _show(status, note)
    except MidstepError as error:
        raise click.ClickException(str(error)) from error


def as_data(status: JobStatus, note: str) -> str:
    """Return the status as one line of JSON, with `live` and, if it is not, `note`."""
    data = {"live": not note, "note": note, **msgspec.to_builtins(status)}
    return msgspec.json.encode(data).decode()


def _watch(job: ReachedJob, as_json: bool, every_s: float) -> None:
    if as_json:
        for status, note in _looks(job, every_s):
            echo_json(as_data(status, note))
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from .display.terminal import Terminal
    from .views.status_view import status_view

    with Live(console=Terminal(), auto_refresh=False, vertical_overflow="visible") as live:
        for status, note in _looks(job, every_s):
            lines = [Text(note, style="yellow")] if note else []
            live.update(Group(*lines, status_view(status)), refresh=True)


def _looks(job: ReachedJob, every_s: float) -> Iterator[tuple[JobStatus, str]]:
    """Look again and again, until the job has ended or the user has seen enough."""
    try:
        while True:
            status, note = look(job)
            yield status, note
            if status.exit_code is not None:
                return
            time.sleep(every_s)  # a screen for a reader, drawn as often as was asked for
    except KeyboardInterrupt:
        return


def _show(status: JobStatus, note: str) -> None:
    from .display.terminal import Terminal
    from .views.status_view import status_view

    if note:
        echo(note, err=True)
    Terminal().print(status_view(status))
