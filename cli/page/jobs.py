"""The jobs that one page serves: the one that it was started for, or all below $MIDSTEP_HOME.

A job is opened when a browser asks for it by its name, and closed for another one when too many are open. The list of
all is made while a browser shows it, and a job that has ended is read from its journal once.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from ...controller.endpoints.control_requests import Reply
from ...controller.endpoints.control_requests import Request as OperatorRequest
from ...controller.role_group import GroupPhase, GroupRestart
from ...launch.directories import (
    JOURNAL_FILE,
    checked_name,
    find_job,
    group_of,
    is_group,
    jobs,
    present_role_directory,
    read_founding,
    read_group,
)
from ...launch.reached_job import GroupLook, HereJob, ReachedJob, RoleLook, look, look_at_group
from ...protocol.errors import ConfigurationError, MidstepError
from ...protocol.incidents import JobStatus
from ..bundle import SupportBundle
from ..views.wording import cell
from .live import LiveJob
from .sections import Looked
from .sentence import Mood, WholeJob, is_over, sentence

MOST_OPEN = 8  # jobs that are looked at
MOST_LISTED = 50  # the latest
LIST_S = 5.0  # between two lists
Ask = Callable[[OperatorRequest], Reply]


class JobAccess(msgspec.Struct, frozen=True):
    """Whatever the page asks of its job. Each is called in a thread, and raises MidstepError.

    `ask`: asks the controller; None: there are no buttons. `bundle`: puts together what a support bundle has. `log`:
    returns the end of what one process of a rank has printed, by the numbers of rank and process.
    """

    look: Callable[[], Looked]
    ask: Ask | None = None
    bundle: Callable[[], SupportBundle] | None = None
    log: Callable[[int, int], str] | None = None


class OpenJob:
    """A job that can be looked at, and how."""

    def __init__(self, access: JobAccess) -> None:
        self.access = access
        self.live = LiveJob(access.look)
        self.running: asyncio.Task[None] | None = None


class PagedJobs:
    """All jobs of a page, by name; the empty name is that of the job for which it was started."""

    def __init__(
        self,
        first: JobAccess | None,
        *,
        find: Callable[[str], JobAccess] | None = None,
        listing: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        """`find` returns how a job is looked at, by its name; `listing` tells of all. Both are called in a thread."""
        self._open = {} if first is None else {"": OpenJob(first)}
        self._find, self._listing = find, listing
        self._changing = asyncio.Lock()
        self._listed: list[dict[str, Any]] = []
        self._list_next_s = 0.0

    @property
    def has_list(self) -> bool:
        """Tell whether there is a list of jobs."""
        return self._listing is not None

    async def of(self, name: str) -> OpenJob:
        """Return a job, which is looked at from now on. Raises MidstepError when there is none of that name."""
        async with self._changing:
            job = self._open.get(name)
            if job is None:
                if self._find is None:
                    raise ConfigurationError("this page is of one job")
                access = await asyncio.to_thread(self._find, name)
                await self._make_room()
                job = self._open[name] = OpenJob(access)
            if job.running is None:
                job.running = asyncio.create_task(job.live.run())
            return job

    async def told(self) -> list[dict[str, Any]]:
        """Return all jobs, as the list has them, a few seconds old at most. Raises MidstepError."""
        async with self._changing:
            if self._listing is not None and time.monotonic() >= self._list_next_s:
                self._listed = await asyncio.to_thread(self._listing)
                self._list_next_s = time.monotonic() + LIST_S
            return self._listed

    def end(self) -> None:
        """End the streams of all viewers."""
        for job in self._open.values():
            job.live.end()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Stop looking at the end."""
        try:
            yield
        finally:
            for job in self._open.values():
                await _stopped(job)

    async def _make_room(self) -> None:
        """Close the job that was opened first of those without a viewer. Raises ConfigurationError if all have one."""
        if len(self._open) < MOST_OPEN:
            return
        name = next((name for name, job in self._open.items() if not job.live.is_watched), None)
        if name is None:
            raise ConfigurationError(f"{MOST_OPEN} jobs are open in browsers, and that is the most: close one")
        await _stopped(self._open.pop(name))


async def _stopped(job: OpenJob) -> None:
    if job.running is not None:
        job.running.cancel()
        await asyncio.gather(job.running, return_exceptions=True)


def named_job(name: str, base: Path) -> HereJob:
    """Return the job of a name in the list, `JOB` or `JOB/ROLE`: no path leads elsewhere. Raises ConfigurationError."""
    parts = name.split("/")
    if len(parts) > 2:
        raise ConfigurationError(f"{name[:80]!r} is no job")
    for part in parts:
        checked_name(part)
    if not any(directory.name == parts[0] for directory in jobs(base)):
        raise ConfigurationError(f"there is no job {parts[0]!r} here")
    return HereJob(find_job(str(base / name), base))


class MeantRole(msgspec.Struct, frozen=True):
    """A role of a job of several, by its name: when all of them begin again, it is in another directory."""

    folder: Path
    role: str

    def present(self) -> HereJob:
        """Return the role as it stands. Raises ConfigurationError."""
        return HereJob(present_role_directory(self.folder, self.role))

    def whole(self) -> WholeJob | None:
        """Return how the job stands that it belongs to; None: it has not begun. Raises ConfigurationError."""
        record = read_group(self.folder)
        if record is None:
            return None
        return _whole(record.group.phase, record.group.exit_code, record.group.reason, record.group.restarts)


def meant_role(name: str | None, found: ReachedJob) -> MeantRole | None:
    """Return the role that a name means, which has led to a job; None: a job that is none, or one attempt by its path.

    Raises ConfigurationError.
    """
    if not isinstance(found, HereJob) or not name:
        return None
    folder, role = group_of(found.directory), Path(name).name
    if folder is None or role not in read_founding(folder).plan.names:
        return None
    return MeantRole(folder, role)


def _whole(phase: GroupPhase, exit_code: int | None, reason: str, restarts: tuple[GroupRestart, ...]) -> WholeJob:
    if phase is GroupPhase.RESTARTING and restarts:
        reason = f"role {restarts[-1].role}: {restarts[-1].reason}"
    return WholeJob(phase, exit_code, reason)


class JobList:
    """Tells of all jobs below a folder, a line each, and of jobs of roles a line for each role."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._ended: dict[str, tuple[float, dict[str, Any]]] = {}  # by name: when it was last written, and its line

    def __call__(self) -> list[dict[str, Any]]:
        """Return the lines, the job that was written to last first. Raises ConfigurationError."""
        return [line for directory in jobs(self._base)[:MOST_LISTED] for line in self._lines(directory)]

    def _lines(self, directory: Path) -> list[dict[str, Any]]:
        name = directory.name
        try:
            if not is_group(directory):
                return [self._line(name, directory)]
            group = look_at_group(directory)
            if not group.roles:
                return [_unread(f"{name}/{role}", "it has not begun") for role in read_founding(directory).plan.names]
            return [_role_line(name, group, role) for role in group.roles]
        except MidstepError as error:
            return [_unread(name, str(error))]

    def _line(self, name: str, directory: Path) -> dict[str, Any]:
        """Return the line of one job; of one that has ended, that of before, unless it was written to since."""
        written_s = _written_s(directory)
        known = self._ended.get(name)
        if known is not None and known[0] == written_s:
            return known[1]
        status, note = look(HereJob(directory))
        line = _read(name, status, note)
        if status.exit_code is not None:
            self._ended[name] = (written_s, line)
        return line


def _written_s(directory: Path) -> float:
    times = [0.0]
    for path in (directory / JOURNAL_FILE, directory / f"{JOURNAL_FILE}-wal", directory / "result.json"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _role_line(job: str, group: GroupLook, role: RoleLook) -> dict[str, Any]:
    """Return the line of a role, which may be as it is because of another one."""
    name = f"{job}/{role.role}"
    if role.status is None:
        return _unread(name, role.note or role.state, Mood.STARTING if group.live else Mood.ASKS)
    return _read(
        name, role.status, role.note, _whole(GroupPhase(group.phase), group.exit_code, group.reason, group.restarts)
    )


def _read(name: str, status: JobStatus, note: str, whole: WholeJob | None = None) -> dict[str, Any]:
    said = sentence(status, note, whole)
    figures = {"headline": said.headline, "figures": said.figures, "at_s": status.at_s}
    return {"name": cell(name), "mood": str(said.mood), **figures, "ended": is_over(status, whole)}


def _unread(name: str, why: str, mood: Mood = Mood.ASKS) -> dict[str, Any]:
    return {"name": cell(name), "mood": str(mood), "headline": cell(why), "figures": "", "at_s": 0, "ended": False}
