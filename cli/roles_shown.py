"""`midstep status` and `midstep report` of a job of several roles."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..launch.reached_job import GroupLook, group_data, look_at_group
from .display.plain import echo, echo_json
from .display.terminal import Terminal
from .views.group_view import group_view


def show_group(directory: Path, *, as_json: bool, every_s: float | None) -> None:
    """Show how a job of roles stands; again and again until it has ended, with `every_s`. Raises MidstepError."""
    if as_json:
        for group in _looks(directory, every_s):
            echo_json(msgspec.json.encode(group_data(group)).decode())
        return
    if every_s is None:
        Terminal().print(group_view(look_at_group(directory)))
        return
    from rich.live import Live

    with Live(console=Terminal(), auto_refresh=False, vertical_overflow="visible") as live:
        for group in _looks(directory, every_s):
            live.update(group_view(group), refresh=True)


def report_group(directory: Path) -> None:
    """Print the report of each role, one after the other. Raises MidstepError."""
    from .report import choose, load_status, print_report

    group = look_at_group(directory)
    Terminal().print(group_view(group))
    for role in group.roles:
        if role.status is not None:
            echo(f"\n=== role {role.role}, attempt {role.attempt} ===")
            status = load_status(Path(role.job_directory))
            print_report(status, choose(status, None))


def _looks(directory: Path, every_s: float | None) -> Iterator[GroupLook]:
    """Look until the job has ended, or the user has seen enough; once, without `every_s`."""
    try:
        while True:
            group = look_at_group(directory)
            yield group
            if every_s is None or group.exit_code is not None:
                return
            time.sleep(every_s)  # a screen for a reader, drawn as often as was asked for
    except KeyboardInterrupt:
        return
