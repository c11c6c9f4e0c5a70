"""The launcher of one role, as a child of the launcher of the whole job: it dies with that, and its role with it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from ...agent.linux import hear_and_die_with
from ...controller.endpoints.discovery_files import JobResult, read_result
from ...controller.role_group import RoleEnded, RoleLauncherLost
from ...protocol.errors import MidstepError
from ...protocol.time_limit import within
from ..jobs.directories import is_job
from ..jobs.journals import read_status
from .group_files import role_directory
from .launched_role import STOP

ROLE_LAUNCHER = (sys.executable, "-m", "midstep.launch.roles.role_launcher")
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
