"""Keeps a job of several roles running: a launcher for each role, the store that they share, and what concerns all.

It decides nothing about recoveries, and nothing about the roles together either: that is `controller/role_group.py`.
When it ends, whatever the signal, so does everything it started.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from ..agent.linux import hear_and_die_with
from ..controller.endpoints.discovery_files import JobResult, read_result, write_result
from ..controller.role_group import (
    EndGroup,
    GroupAction,
    GroupEvent,
    GroupPhase,
    GroupStopAsked,
    RoleEnded,
    RoleGroup,
    RoleLauncherLost,
    RoleState,
    StartRole,
    StopRole,
    Turn,
    begin,
    handle,
    reopen,
)
from ..protocol.compat import within
from ..protocol.errors import JournalError, MidstepError
from ..protocol.own_programs import own_program
from .directories import GroupRecord, is_job, role_directory, write_group
from .launcher import cancelled
from .processes import Backoff, RestartBackoff, StopSignals
from .reached_job import read_status
from .roles import STOP, OpenedGroup, SharedStore

WRITE_AGAIN_S = 1.0
WRITE_FOR_S = 600.0  # as a controller tries for a journal that cannot be written
STOP_MARGIN_S = 60.0
_log = logging.getLogger(__name__)
ROLE_LAUNCHER = own_program("midstep.cli.role_launcher")
KILLED_S = 10.0


class RoleProcess:
    """One try to run a role in one attempt. `stop_s`: how long the role may take to end in order.

    `outlived`: its job may live without a launcher, and is only followed to be stopped.
    """

    def __init__(
        self, directory: Path, role: str, attempt: int, *, quiet: bool, stop_s: float, outlived: bool = False
    ) -> None:
        self.role, self.attempt = role, attempt
        self._directory = directory
        self._job_directory = role_directory(directory, role, attempt)
        self._quiet = quiet
        self._stop_s = stop_s
        self._outlived = outlived
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, working_directory: str, delay_s: float = 0.0) -> RoleEnded | RoleLauncherLost:
        """Start it after `delay_s`, and return how it ended."""
        result = await asyncio.to_thread(how_it_ended, self._job_directory)
        if result is not None:  # the launcher of the whole job was lost before it could note that
            return self._ended(result)
        with contextlib.suppress(TimeoutError):
            await within(max(delay_s, 0.0), self._stopping.wait())
        if self._stopping.is_set() and not self._outlived:
            return RoleLauncherLost(self.role, self.attempt, "was not started, as its role was to end", 0.0)
        began_s = time.monotonic()
        try:
            self._process = await self._spawn(working_directory)
        except OSError as error:  # no process, no memory, no descriptor is left
            return RoleLauncherLost(self.role, self.attempt, f"could not be started: {error}", 0.0)
        if self._stopping.is_set() and not self._outlived:
            self._signal(signal.SIGINT)
        status = await self._wait()
        lived_s = time.monotonic() - began_s
        result = await asyncio.to_thread(how_it_ended, self._job_directory)
        if result is not None:
            return self._ended(result)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return RoleLauncherLost(self.role, self.attempt, f"ended with {how}, and its job has not", lived_s)

    def stop(self) -> None:
        """Ask the role to end in order. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._signal(signal.SIGINT)

    async def close(self) -> None:
        """Kill it if it lives, and wait a little for its end. Idempotent."""
        self._stopping.set()
        self._signal(signal.SIGKILL)
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await within(KILLED_S, self._process.wait())

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _spawn(self, working_directory: str) -> asyncio.subprocess.Process:
        """Start the process: what it shows goes where this one's output goes; Ctrl-C reaches it from here only."""
        flags = [*(["--quiet"] if self._quiet else []), *([STOP] if self._outlived else [])]
        return await asyncio.create_subprocess_exec(
            *(*ROLE_LAUNCHER, str(self._directory), self.role, str(self.attempt), *flags),
            stdin=subprocess.DEVNULL,
            cwd=working_directory,
            start_new_session=True,
            preexec_fn=partial(hear_and_die_with, os.getpid()),
        )

    async def _wait(self) -> int:
        """Wait for its end; one that was asked to end and does not is killed."""
        assert self._process is not None
        exited = asyncio.ensure_future(self._process.wait())
        asked = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([exited, asked], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([exited], timeout=self._stop_s)
            if not exited.done():
                self._signal(signal.SIGKILL)
            return await exited
        finally:
            asked.cancel()
            exited.cancel()

    def _ended(self, result: JobResult) -> RoleEnded:
        return RoleEnded(self.role, self.attempt, result.exit_code, result.reason)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def how_it_ended(job_directory: Path) -> JobResult | None:
    """Return how the job of a role ended; None while it has not, or where nothing can be read."""
    try:
        result = read_result(job_directory)
        if result is not None or not is_job(job_directory):
            return result
        status = read_status(job_directory)
    except MidstepError:  # the launcher that continues it says what is wrong
        return None
    if status.exit_code is None:
        return None
    return JobResult(job_directory.name, status.exit_code, status.reason, status.term, status.at_s)


class RolesLauncher:
    """Runs one job of roles to its end. Use as `await RolesLauncher(opened, quiet=False).run()`."""

    def __init__(self, opened: OpenedGroup, *, quiet: bool) -> None:
        self._opened = opened
        self._founding = opened.founding
        self._rules = opened.founding.rules
        self._quiet = quiet
        self._events: asyncio.Queue[GroupEvent] = asyncio.Queue()
        self._processes: dict[str, RoleProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._backoffs: dict[str, RestartBackoff] = {}
        self._delays_s: dict[str, float] = {}
        self._store: SharedStore | None = None
        self._result: JobResult | None = None

    async def run(self) -> JobResult:
        """Start all roles, wait for the end, clear everything away, and return how the job ended.

        Raises JournalError when how the roles stand can no longer be written.
        """
        async with contextlib.AsyncExitStack() as ending:
            ending.callback(self._remove)
            self._store = ending.enter_context(SharedStore(self._founding, self._opened.directory))
            ending.push_async_callback(self._close)
            stop = ending.enter_context(StopSignals(self._ask_to_stop, "asking all roles to stop"))
            deciding = asyncio.create_task(self._decide())
            ending.push_async_callback(cancelled, deciding)
            insisting = asyncio.create_task(stop.insisted.wait())
            ending.push_async_callback(cancelled, insisting)
            await asyncio.wait([deciding, insisting], return_when=asyncio.FIRST_COMPLETED)
            if deciding.done():
                return await deciding
            return JobResult(self._founding.job, 130, "interrupted twice: ended at once", 0, time.time())

    # --- what is decided --------------------------------------------------------------------------------------------

    async def _decide(self) -> JobResult:
        before = self._opened.group
        turn = begin(self._rules)
        if before is not None:
            live = self._founding.roles_outlive_launcher
            turn = reopen(before, self._rules, roles_live=live)
            if live:
                _log.warning("the launcher was lost, and the store with it: what lives is stopped, with checkpoints")
        while True:
            await self._carry_out(turn)
            if self._result is not None:
                return self._result
            group, event = turn[0], await self._events.get()
            turn = handle(group, self._rules, event, time.time())
            self._say(event, group.phase, turn)

    async def _carry_out(self, turn: Turn) -> None:
        """Make what is known durable, and then do what follows."""
        group, actions = turn
        await self._write(GroupRecord(str(self._opened.held.path), group))
        for action in actions:
            self._act(action, group)

    def _act(self, action: GroupAction, group: RoleGroup) -> None:
        match action:
            case StartRole():
                self._start(action, outlived=group.of(action.role).state is RoleState.STOPPING)
            case StopRole():
                self._processes[action.role].stop()
            case EndGroup():
                self._result = JobResult(self._founding.job, action.exit_code, action.reason, 0, time.time())
                write_result(self._opened.directory, self._result)
                if self._store is not None:
                    self._store.end()

    async def _write(self, record: GroupRecord) -> None:
        give_up_s = time.monotonic() + WRITE_FOR_S
        said = False
        while True:
            try:
                await asyncio.to_thread(write_group, self._opened.directory, record)
                return
            except OSError as error:
                if time.monotonic() >= give_up_s:
                    raise JournalError(
                        f"{self._opened.directory}: how the roles stand could not be written for {WRITE_FOR_S:g} s: "
                        f"{error}. Make room there, and continue with `midstep resume`."
                    ) from error
                if not said:
                    _log.error("how the roles stand cannot be written, so nothing is decided: %s", error)
                    said = True
                await asyncio.sleep(WRITE_AGAIN_S)

    # --- the roles --------------------------------------------------------------------------------------------------

    def _start(self, action: StartRole, *, outlived: bool) -> None:
        role = self._founding.plan.role(action.role)
        assert role is not None, "only roles of the file are started"
        assert self._store is not None
        self._store.begin(action.attempt)
        limits = role.policy.deadlines
        process = RoleProcess(
            self._opened.directory,
            action.role,
            action.attempt,
            quiet=self._quiet,
            outlived=outlived,
            stop_s=limits.quiesce_s + limits.save_s + limits.stop_grace_s + STOP_MARGIN_S,
        )
        self._processes[action.role] = process
        self._tasks[action.role] = asyncio.create_task(self._follow(process, self._delays_s.pop(action.role, 0.0)))

    async def _follow(self, process: RoleProcess, delay_s: float) -> None:
        event: RoleEnded | RoleLauncherLost
        try:
            event = await process.run(self._founding.working_directory, delay_s)
        except Exception as error:  # a role of which nothing is heard any more would be waited for without end
            _log.exception("role %s cannot be watched", process.role)
            await process.close()
            event = RoleLauncherLost(process.role, process.attempt, f"could not be watched: {error}", 0.0)
        if isinstance(event, RoleLauncherLost):
            backoff = self._backoffs.setdefault(event.role, RestartBackoff(Backoff()))
            self._delays_s[event.role] = backoff.delay_s(event.lived_s, random.random())
        self._events.put_nowait(event)

    def _ask_to_stop(self, reason: str) -> None:
        self._events.put_nowait(GroupStopAsked(reason))

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*(process.close() for process in self._processes.values()))

    def _remove(self) -> None:
        for path in self._opened.held.remove():
            _log.error("%s cannot be removed: remove it", path)

    def _say(self, event: GroupEvent, before: GroupPhase, turn: Turn) -> None:
        group, _ = turn
        if isinstance(event, RoleLauncherLost) and before is GroupPhase.RUNNING:
            _log.warning("role %s: its launcher %s; it continues from its journal", event.role, event.how)
        if group.phase is not before and group.phase in {GroupPhase.RESTARTING, GroupPhase.RUNNING}:
            _log.warning("%s", _restarting(turn) if group.phase is GroupPhase.RESTARTING else "all roles begin again")
        if group.phase is not before and group.phase is GroupPhase.ENDING:
            _log.warning("the roles that are left are stopped: %s", group.reason)


def _restarting(turn: Turn) -> str:
    restart = turn[0].restarts[-1]
    return f"all roles are restarted from their checkpoints: role {restart.role} failed"
