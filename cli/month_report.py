"""`midstep report --all`: where the last 30 days of all jobs went, a line each, and the sum over jobs.

The time of a job counts as far as it lies in these days, whatever has become of the job. A sum is of the time of jobs,
and once more of that of their ranks, so that a large job counts for what it holds.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..launch.directories import is_group, jobs, read_founding
from ..launch.reached_job import HereJob, look, look_at_group, read_times
from ..protocol.errors import MidstepError
from ..protocol.incidents import JobStatus
from ..protocol.time_spent import TimeCategory, TimeSpent
from .views.incident_data import time_json
from .views.time_text import MONTH_S, share_text, time_table
from .views.wording import ABSENT, cell, count_text, duration_text

_SUM = "all jobs"


class JobMonth(msgspec.Struct, frozen=True):
    """The last 30 days of one job. `time`: None if it had ended before; `trouble`: why nothing is known."""

    name: str
    state: str = ""
    ranks: int = 0
    incidents: int = 0
    time: TimeSpent | None = None
    trouble: str = ""


class Month(msgspec.Struct, frozen=True):
    """The last 30 days of all jobs in a folder."""

    began_s: float
    jobs: tuple[JobMonth, ...]

    def total(self, *, of_ranks: bool = False) -> TimeSpent | None:
        """Return the sum over jobs whose training is known; of their ranks if asked. None: there is none."""
        seconds: dict[TimeCategory, float] = {}
        for job in self.jobs:
            if job.time is not None and job.time.goodput is not None:
                for category, duration_s in job.time.seconds.items():
                    share = duration_s * (job.ranks if of_ranks else 1)
                    seconds[category] = seconds.get(category, 0.0) + share
        wall_s = sum(seconds.values())
        if wall_s <= 0.0:
            return None
        return TimeSpent(0.0, wall_s, seconds.get(TimeCategory.TRAINING, 0.0) / wall_s, seconds)


def month_of(base: Path | None = None) -> Month:
    """Return the last 30 days of all jobs below `base`, or $MIDSTEP_HOME. Raises ConfigurationError."""
    began_s = time.time() - MONTH_S
    return Month(began_s, tuple(each for directory in jobs(base) for each in _of_directory(directory, began_s)))


def _of_directory(directory: Path, began_s: float) -> Iterator[JobMonth]:
    name = directory.name
    try:
        if not is_group(directory):
            yield _of_job(name, directory, began_s)
            return
        roles = look_at_group(directory).roles
        for role in read_founding(directory).plan.names if not roles else ():
            yield JobMonth(f"{name}/{role}", trouble="it has not begun")
        for each in roles:
            if each.status is None:
                yield JobMonth(f"{name}/{each.role}", trouble=each.note or each.state)
            else:
                yield _of_job(f"{name}/{each.role}", Path(each.job_directory), began_s)
    except MidstepError as error:
        yield JobMonth(name, trouble=str(error))


def _of_job(name: str, directory: Path, began_s: float) -> JobMonth:
    try:
        status, _ = look(HereJob(directory))
        spent = read_times(directory).since(began_s, status.at_s)
    except MidstepError as error:
        return JobMonth(name, trouble=str(error))
    state = str(status.phase) if status.exit_code is None else f"ended, exit code {status.exit_code}"
    return JobMonth(name, state, len(status.ranks), _incidents(status, began_s), spent)


def _incidents(status: JobStatus, began_s: float) -> int:
    return sum(not each.is_requested and each.began_s >= began_s for each in status.incidents)


def month_view(month: Month) -> RenderableType:
    """Return the month as text: a line per job, the sum by category, and the ETTR."""
    shown = [job for job in month.jobs if job.time is not None or job.trouble]
    if not shown:
        return Text("no job has run in the last 30 days")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("job", overflow="fold")
    table.add_column("state", overflow="fold")
    for heading in ("ranks", "incidents", "time", "training", "ETTR"):
        table.add_column(heading, justify="right", no_wrap=True)
    for job in shown:
        table.add_row(cell(job.name), cell(job.trouble or job.state), *_figures(job))
    parts: list[RenderableType] = [table]
    total, of_ranks = month.total(), month.total(of_ranks=True)
    if total is not None and of_ranks is not None:
        parts += [Text(""), time_table({_SUM: total})]
        line = Text(f"effective training time ratio (ETTR) of the last 30 days, {_counted(month.jobs)}: ")
        line.append(share_text(total.goodput), style="bold").append(f"; of their ranks: {share_text(of_ranks.goodput)}")
        parts.append(line)
    return Group(*parts)


def _counted(all_jobs: Iterable[JobMonth]) -> str:
    known = [job.time.goodput is not None for job in all_jobs if job.time is not None]
    left_out = len(known) - sum(known)
    beside = f", {left_out} left out whose training is not seen" if left_out else ""
    return f"{count_text(sum(known), 'job')}{beside}"


def _figures(job: JobMonth) -> tuple[str, ...]:
    if job.time is None:
        return (ABSENT,) * 5
    trained_s = None if job.time.goodput is None else job.time.seconds.get(TimeCategory.TRAINING, 0.0)
    figures = (duration_text(job.time.wall_s), duration_text(trained_s), share_text(job.time.goodput))
    return (str(job.ranks), str(job.incidents), *figures)


def month_json(month: Month) -> dict[str, Any]:
    """Return the month as data."""
    total, of_ranks = month.total(), month.total(of_ranks=True)
    return {
        "began_s": month.began_s,
        "jobs": [
            {**msgspec.to_builtins(job), "time": None if job.time is None else time_json(job.time)}
            for job in month.jobs
        ],
        "all_jobs": None if total is None else _sum_json(total),
        "all_ranks": None if of_ranks is None else _sum_json(of_ranks),
    }


def _sum_json(total: TimeSpent) -> dict[str, Any]:
    return {name: value for name, value in time_json(total).items() if name not in {"began_s", "ended_s"}}
