"""Keeps a job on one machine alive: the controller process, started again when it dies, and the local platform.

The launcher decides nothing about recoveries. When it ends, whatever the signal, so does everything it started.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from watchfiles import awatch

from ..agent.kernel import die_with_parent
from ..controller.doors.notices import Result, read_endpoint, read_result
from ..controller.journal import read_status
from ..platforms.local import LocalOptions, LocalPlatform
from ..platforms.log_files import open_log
from ..protocol.errors import JournalError, MidstepError, PlatformError
from .controller import EXIT_FAILED
from .fault_watch import watch_faults
from .job_start import Job

_log = logging.getLogger(__name__)

# Status and new lines of logs are for a reader's eyes: nobody tells of them, and more often than this is not seen.
LOOK_S = 0.2
FILE_LOOK_MS = 100  # a file system that tells of no changes is looked at this often
START_S = 60.0
STOP_MARGIN_S = 10.0
RESTARTS = 10  # of the controller, within RESTARTS_WINDOW_S
RESTARTS_WINDOW_S = 60.0


class Launcher:
    """Runs one job to its end. Use as `await Launcher(job).run()`."""

    def __init__(self, job: Job, look: Callable[[], None] = lambda: None) -> None:
        self._job = job
        self._look = look
        self._stops = 0
        self._controller: asyncio.subprocess.Process | None = None

    async def run(self) -> Result:
        """Start controller and nodes, wait for the end, clear everything away, and return how the job ended.

        Raises PlatformError when the controller cannot be kept running; everything is cleared away then, too.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        supervising = asyncio.create_task(self._keep_controller())
        platform: LocalPlatform | None = None
        watching: asyncio.Task[None] | None = None
        try:
            endpoint = await self._endpoint(supervising)
            spec = self._job.spec
            platform = LocalPlatform(
                LocalOptions(
                    job=spec.job,
                    controller=endpoint,
                    keys=str(self._job.run_directory / "keys"),
                    run_directory=str(self._job.run_directory),
                    log_directory=str(self._job.job_directory / "logs"),
                    grace_s=spec.settings.stop_grace_s + STOP_MARGIN_S,
                ),
                # What an agent imports for its ranks it imports in their environment, and at once.
                environment={**os.environ, **spec.environment},
            )
            platform.start(spec.nodes + spec.spare_nodes)
            if self._job.fault_sources:
                watching = asyncio.create_task(watch_faults(self._job))
            while not supervising.done() and self._stops < 2:
                self._look()
                await asyncio.wait([supervising], timeout=LOOK_S)
            if self._stops >= 2:
                supervising.cancel()
                return Result(spec.job, 130, "interrupted twice: ended at once", 0, time.time())
            return await supervising
        finally:
            await _cancelled(watching)
            supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError, PlatformError):
                await supervising
            if platform is not None:
                await platform.close()
            self._end_controller()
            self._look()
            shutil.rmtree(self._job.run_directory, ignore_errors=True)

    async def _endpoint(self, supervising: "asyncio.Task[Result]") -> str:
        written = asyncio.create_task(_written_endpoint(self._job.run_directory))
        try:
            await asyncio.wait([supervising, written], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if written.done():
                return written.result()
        finally:
            await _cancelled(written)
        log = self._job.job_directory / "logs" / "controller.log"
        raise PlatformError(f"the controller does not come up; see {log}")

    async def _keep_controller(self) -> Result:
        """Run the controller, again and again if it dies before the job is over."""
        job = self._job
        starts: deque[float] = deque(maxlen=RESTARTS)
        path = job.job_directory / "logs" / "controller.log"
        with open(open_log(path), "ab", buffering=0) as log:
            while True:
                if len(starts) == RESTARTS and time.monotonic() - starts[0] < RESTARTS_WINDOW_S:
                    raise PlatformError(
                        f"the controller has died {RESTARTS} times in {RESTARTS_WINDOW_S:g} s; see {path}"
                    )
                starts.append(time.monotonic())
                self._controller = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "midstep.cli.main", "controller"),
                    *("--job-dir", str(job.job_directory), "--run-dir", str(job.run_directory)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
                _write_pid(job.run_directory / "controller.pid", self._controller.pid)
                status = await self._controller.wait()
                result = _result(job, status)
                if result is not None:
                    return result
                _log.warning("the controller ended with status %d before the job was over; starting it again", status)

    def _on_signal(self, number: int) -> None:
        self._stops += 1
        if self._stops == 1 and self._controller is not None:
            _log.warning("%s: asking the job to stop; once more ends it at once", signal.Signals(number).name)
            with contextlib.suppress(ProcessLookupError):
                self._controller.send_signal(signal.SIGINT)

    def _end_controller(self) -> None:
        if self._controller is not None and self._controller.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._controller.kill()


def _write_pid(path: Path, pid: int) -> None:
    """Say which process is the controller, for people: nothing that runs reads it."""
    try:
        path.write_text(str(pid))
    except OSError as error:
        _log.warning("%s cannot be written: %s; the controller is process %d", path, error.strerror, pid)


def _result(job: Job, status: int) -> Result | None:
    """Return how the job ended: by its file, or by its journal where that could not be written. None: it has not."""
    try:
        result = read_result(job.job_directory)
    except MidstepError as error:
        _log.warning("%s", error)
        result = None
    if result is not None or status < 0 or status == EXIT_FAILED:
        return result
    try:
        ended = read_status(job.job_directory)
    except JournalError as error:
        _log.warning("%s", error)
        return None
    if ended.exit_code is None:
        return None
    return Result(job.spec.job, ended.exit_code, ended.reason, ended.term, ended.at_s)


async def _written_endpoint(run_directory: Path) -> str:
    """Return where the controller listens as soon as it has written that down."""
    changes = awatch(
        run_directory, watch_filter=None, step=5, rust_timeout=FILE_LOOK_MS, yield_on_timeout=True, recursive=False
    )
    async with contextlib.aclosing(changes):
        while True:
            with contextlib.suppress(MidstepError):  # the controller says so in its log, when it is to stay so
                endpoint = read_endpoint(run_directory)
                if endpoint is not None:
                    return endpoint
            await anext(changes)


async def _cancelled(task: "asyncio.Task[Any] | None") -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
