"""`midstep report`: what happened in a job, when, where and why; as text, data, a picture or a trace.

It replays the job's journal read-only, so it works while the job runs, after it, and after its controller was killed.
"""

import shutil
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import RenderableType

from ..controller.endpoints.control_requests import StatusReply, StatusRequest, StoryReply, StoryRequest
from ..launch.directories import find_job
from ..launch.reached_job import HereJob, JobElsewhere, ReachedJob, reached
from ..protocol.errors import ConfigurationError
from ..protocol.incidents import Incident, JobStatus
from ..protocol.slow_records import SlowTold
from ..protocol.time_spent import TimeSpent
from .display.plain import echo, echo_as_it_is, echo_json
from .display.terminal import Terminal
from .ended_incidents import asked, incidents_after
from .frame import Command, operator_options
from .kept_forecast import kept_forecast
from .numbers import INCIDENT
from .views.incident_data import report_json

WIDTH = 100
NARROWEST = 80  # tables of ranks do not fit on less
STORY_S = 150.0  # the controller reads its journal first, and for others before


@click.command("report", cls=Command)
@click.argument("job", required=False, metavar="[JOB_OR_DIRECTORY]")
@click.option("--all", "all_jobs", is_flag=True, help="The last 30 days of all jobs here: a line each, and the sum.")
@click.option("--incident", "number", type=INCIDENT, metavar="N", help="Only incident N.")
@click.option("--story", is_flag=True, help="Print each event and what followed from it: the chain of causes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw ranks and phases over time into FILE (.png, .svg or .pdf).",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a trace for ui.perfetto.dev or chrome://tracing into FILE (JSON).",
)
@operator_options
def command(
    *,
    job: str | None,
    all_jobs: bool,
    number: int | None,
    story: bool,
    as_json: bool,
    picture: Path | None,
    trace: Path | None,
    controller: str | None,
    token_file: Path | None,
) -> None:
    """Show what happened in a job: each incident, the rung taken and why no cheaper one, phases, budgets.

    JOB_OR_DIRECTORY is a job's name, the beginning of one, or a job directory; without it, the latest job is meant.
    JOB/ROLE is one role of a job of several.
    Jobs are looked for in $MIDSTEP_HOME, or in ~/.midstep/jobs. With --controller it is the job's whole name, and the
    controller of a job that runs is asked for its incidents, and for the story as far as one answer holds it.

    \b
    Examples:
      midstep report                              the latest job
      midstep report demo --incident 2            one incident of job "demo"
      midstep report --incident 2 --story         what led to what in it, event by event
      midstep report --picture report.png         and draw it
      midstep report --all                        the month of all jobs: effective training time ratio (ETTR)
      midstep report --controller m0:29400 --token-file viewer.token
    """
    from ..launch.reached_job import group_meant

    if all_jobs:
        report_all(alone=not (job or number is not None or story or picture or trace or controller), as_json=as_json)
        return
    group = group_meant(job, controller)
    if group is not None:
        if number is not None or story or as_json or picture or trace:
            find_job(job)  # says which roles there are
        report_group(group)
        return
    target = reached(job, controller, token_file)
    status, slow = load_history(target.directory) if isinstance(target, HereJob) else ask_for_history(target)
    incidents = choose(status, number)
    if picture is not None:
        from .views.pictures import write_picture

        write_picture(status, incidents, picture)
        echo(f"wrote {picture}", err=True)
    if trace is not None:
        from .views.incident_data import trace_json

        write_text(trace, _json(trace_json(status, incidents)))
        echo(f"wrote {trace} (open it at ui.perfetto.dev)", err=True)
    if story:
        print_story(target, number)
    elif as_json:
        echo_json(_json(report_json(status, incidents, kept_forecast(target), slow)))
    else:
        print_report(status, incidents, kept_forecast(target), slow)


def report_all(*, alone: bool, as_json: bool) -> None:
    """Print the last 30 days of all jobs. `alone`: nothing else was asked for. Raises MidstepError."""
    if not alone:
        raise ConfigurationError("--all is of all jobs on this machine: leave out the job, and all options but --json")
    from .month_report import month_json, month_of, month_view

    month = month_of()
    if as_json:
        echo_json(_json(month_json(month)))
    else:
        show(month_view(month), WIDTH)


def report_group(directory: Path) -> None:
    """Print the report of each role, one after the other. Raises MidstepError."""
    from ..launch.reached_job import look_at_group
    from .views.status_view import group_view

    group = look_at_group(directory)
    Terminal().print(group_view(group))
    for role in group.roles:
        if role.status is not None:
            echo(f"\n=== role {role.role}, attempt {role.attempt} ===")
            place = HereJob(Path(role.job_directory))
            status, slow = load_history(place.directory)
            print_report(status, choose(status, None), kept_forecast(place), slow)


def load_status(job_directory: Path) -> JobStatus:
    """Return a job's status as `load_history` does."""
    return load_history(job_directory)[0]


def load_history(job_directory: Path) -> tuple[JobStatus, SlowTold]:
    """Replay a job's journal, read-only, to its last event. Raises JournalError if it cannot be read.

    Returns the status, and which nodes were named slow.
    """
    from ..launch.reached_job import read_history

    return read_history(job_directory)


def ask_for_history(job: JobElsewhere) -> tuple[JobStatus, SlowTold]:
    """Ask a job's controller for its status, and for all incidents, page by page. Raises MidstepError."""
    told = asked(job, StatusRequest(), StatusReply)
    incidents = tuple(incidents_after(job, 0))
    return msgspec.structs.replace(told.status, incidents=incidents, incidents_left_out=0), told.slow


def print_story(job: ReachedJob, number: int | None) -> None:
    """Print what led to what, in the job or in one incident: from its journal, or as its controller tells it."""
    if isinstance(job, HereJob):
        print_read_story(job.directory, number)
    else:
        print_told_story(job, number)


def print_read_story(job_directory: Path, number: int | None) -> None:
    """Print each event of the job, or of one incident, with what followed from it, as it is read."""
    from ..launch.reached_job import read_story
    from .story import story_lines

    first = True
    for turn in read_story(job_directory):
        if first:
            say_not_kept(turn.number)
        first = False
        if number is None or number in turn.incidents:
            echo("\n".join(story_lines(turn)))


def print_told_story(job: JobElsewhere, number: int | None) -> None:
    """Print what a job's controller tells of its story. Raises MidstepError."""
    from .views.wording import count_text

    told = asked(job, StoryRequest(number), StoryReply, STORY_S)
    say_not_kept(told.first)
    where = "an answer holds no more; the controller's machine has all (`midstep report --story`)"
    if told.earlier_left_out:
        echo(
            f"{count_text(told.earlier_left_out, 'earlier event')} left out: {where}, or ask for an incident", err=True
        )
    for event in told.told:
        echo(event)
    if told.later_left_out:
        echo(f"{count_text(told.later_left_out, 'later event')} of the incident left out: {where}", err=True)


def say_not_kept(first: int) -> None:
    """Say that a story begins late, if it does. `first`: the number of the earliest event that is kept."""
    if first > 1:
        echo(f"the events before number {first} are not kept any more; the report has their incidents", err=True)


def choose(status: JobStatus, number: int | None) -> tuple[Incident, ...]:
    """Return all incidents, or the one with this number. Raises ConfigurationError that says which there are."""
    if number is None:
        return status.incidents
    chosen = tuple(incident for incident in status.incidents if incident.number == number)
    if not chosen:
        from ..protocol.wording import numbers_text

        there = numbers_text(incident.number for incident in status.incidents)
        known = f"it has incidents {there}" if there else "it has had no incidents"
        raise ConfigurationError(f"job {status.job} has no incident {number}; {known}")
    return chosen


def print_report(
    status: JobStatus, incidents: tuple[Incident, ...], forecast: TimeSpent | None, slow: SlowTold
) -> None:
    """Print the report to standard output: colours on a terminal, plain text in a file or a pipe."""
    from .views.report_text import job_view

    width = min(WIDTH, max(NARROWEST, shutil.get_terminal_size((WIDTH, 0)).columns))
    show(job_view(status, incidents, width=width, forecast=forecast, slow=slow), width)


def show(view: RenderableType, width: int) -> None:
    """Print a view to standard output, without the blanks that tables leave at the ends of lines."""
    terminal = Terminal(width=width)
    with terminal.capture() as captured:
        terminal.print(view)
    echo_as_it_is("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _json(data: dict[str, Any]) -> str:
    """Return data as JSON, with null for what is no number."""
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def write_text(path: Path, text: str) -> None:
    """Write a file, or raise ConfigurationError that says why that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path}: {error.strerror}. Name a file in a directory that you may write to."
        ) from error
