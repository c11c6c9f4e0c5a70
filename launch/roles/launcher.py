"""Keeps a job of several roles running: a launcher for each role, the store that they share, and what concerns all.

It decides nothing about recoveries, and nothing about the roles together either: that is `controller/role_group.py`.
When it ends, whatever the signal, so does everything it started.
"""

import asyncio
import contextlib
import logging
import random
import time

from ...controller.endpoints.discovery_files import JobResult, write_result
from ...controller.role_group import (
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
from ...protocol.errors import JournalError
from ..supervision.backoff import Backoff, RestartBackoff
from ..supervision.launcher import cancelled
from ..supervision.stop_signals import StopSignals
from .group_files import GroupRecord, write_group
from .opening import OpenedGroup
from .role_process import RoleProcess
from .store import SharedStore

WRITE_AGAIN_S = 1.0
WRITE_FOR_S = 600.0  # as a controller tries for a journal that cannot be written
STOP_MARGIN_S = 60.0

_log = logging.getLogger(__name__)


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


def result_of(opened: OpenedGroup, *, quiet: bool) -> JobResult:
    """Run a job of roles in this process, and return how it ended."""
    return asyncio.run(RolesLauncher(opened, quiet=quiet).run())
