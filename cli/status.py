"""`midstep status`: how a job stands, from its controller, or from its journal when there is none."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ..launch.reached_job import (
    ReachedJob,
    look,
    reached,
)
from ..protocol.incidents import JobStatus
from ..protocol.time_spent import TimeSpent
from .display.plain import echo, echo_json
from .frame import Command, operator_options
from .kept_forecast import kept_forecast
from .numbers import seconds

_Look = TypeVar("_Look")


@click.command("status", cls=Command)
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

    directory = group_meant(job, controller)
    if directory is not None:
        _show_group(directory, as_json, every_s if watch else None)
    else:
        _show(reached(job, controller, token_file), as_json, every_s if watch else None)


def as_data(status: JobStatus, note: str, forecast: TimeSpent | None = None) -> str:
    """Return the status as one line of JSON, with `live` and, if it is not, `note`; and the forecast that was kept."""
    foreseen = msgspec.to_builtins(forecast)
    data = {"live": not note, "note": note, **msgspec.to_builtins(status), "forecast": foreseen}
    return msgspec.json.encode(data).decode()


def _show(target: ReachedJob, as_json: bool, every_s: float | None) -> None:
    """Show how a job stands; again and again until it has ended, with `every_s`. Raises MidstepError."""
    looks = _looks(lambda: look(target), lambda found: found[0].exit_code is not None, every_s)
    forecast = kept_forecast(target)
    if as_json:
        for status, note in looks:
            echo_json(as_data(status, note, forecast))
        return
    from rich.console import Group
    from rich.text import Text

    from .views.status_view import status_view

    if every_s is None:
        ((status, note),) = looks
        if note:
            echo(note, err=True)
        _print((status_view(status, forecast),), refreshed=False)
        return
    views = (
        Group(*([Text(note, style="yellow")] if note else []), status_view(status, forecast)) for status, note in looks
    )
    _print(views, refreshed=True)


def _show_group(directory: Path, as_json: bool, every_s: float | None) -> None:
    """Show how a job of roles stands, as `_show` does. Raises MidstepError."""
    from ..launch.reached_job import group_data, look_at_group

    looks = _looks(lambda: look_at_group(directory), lambda group: group.exit_code is not None, every_s)
    if as_json:
        for group in looks:
            echo_json(msgspec.json.encode(group_data(group)).decode())
        return
    from .views.status_view import group_view

    _print((group_view(group) for group in looks), refreshed=every_s is not None)


def _looks(
    look_once: Callable[[], _Look], has_ended: Callable[[_Look], bool], every_s: float | None
) -> Iterator[_Look]:
    """Look until the job has ended, or the user has seen enough; once, without `every_s`."""
    try:
        while True:
            found = look_once()
            yield found
            if every_s is None or has_ended(found):
                return
            time.sleep(every_s)  # a screen for a reader, drawn as often as was asked for
    except KeyboardInterrupt:
        return


def _print(views: Iterable[Any], *, refreshed: bool) -> None:
    """Print views one below the other, or each in the place of the last one."""
    from .display.terminal import Terminal

    terminal = Terminal()
    if not refreshed:
        for view in views:
            terminal.print(view)
        return
    from rich.live import Live

    with Live(console=terminal, auto_refresh=False, vertical_overflow="visible") as live:
        for view in views:
            live.update(view, refresh=True)
