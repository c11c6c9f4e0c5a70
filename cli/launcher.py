"""Keeps a job on one machine alive: the controller process, started again when it dies, and the local platform.

The launcher decides nothing about recoveries. When it ends, whatever the signal, so does everything it started.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from watchfiles import awatch

from ..agent.kernel import die_with_parent
from ..controller.doors.notices import Result, read_endpoint, read_result
from ..platforms.local import LocalOptions, LocalPlatform
from ..protocol.errors import PlatformError
from ..protocol.private_files import open_log
from .fault_watch import watch_faults
from .job_start import Job
from .stop_signals import StopSignals

_log = logging.getLogger(__name__)

FILE_LOOK_MS = 100  # a file system that tells of no changes is looked at this often
START_S = 60.0
STOP_MARGIN_S = 10.0
RESTARTS = 10  # of the controller, within RESTARTS_WINDOW_S
RESTARTS_WINDOW_S = 60.0


class Launcher:
    """Runs one job to its end. Use as `await Launcher(job).run()`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._controller: asyncio.subprocess.Process | None = None

    async def run(self) -> Result:
        """Start controller and nodes, wait for the end, clear everything away, and return how the job ended.

        Raises PlatformError when the controller cannot be kept running. Everything is cleared away then, too, and
        whatever else fails: each part by itself, the keys last.
        """
        async with contextlib.AsyncExitStack() as ending:
            ending.callback(_remove, self._job.run_directory)
            stop = await ending.enter_async_context(StopSignals(self._job.run_directory))
            supervising = asyncio.create_task(self._keep_controller())
            ending.callback(self._end_controller)
            ending.push_async_callback(_cancelled, supervising)
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
            ending.push_async_callback(platform.close)
            ending.push_async_callback(_cancelled, supervising)  # before the nodes leave, which is no fault then
            platform.start(spec.nodes + spec.spare_nodes)
            if self._job.fault_sources:
                watching = asyncio.create_task(watch_faults(self._job))
                watching.add_done_callback(_say_failure)
                ending.push_async_callback(_cancelled, watching)
            return await self._result(supervising, stop)

    async def _result(self, supervising: "asyncio.Task[Result]", stop: StopSignals) -> Result:
        insisting = asyncio.create_task(stop.insisted.wait())
        await asyncio.wait([supervising, insisting], return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(insisting)
        if not supervising.done():
            return Result(self._job.spec.job, 130, "interrupted twice: ended at once", 0, time.time())
        return await supervising

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
        with open_log(job.job_directory / "logs" / "controller.log") as log:
            while True:
                if len(starts) == RESTARTS and time.monotonic() - starts[0] < RESTARTS_WINDOW_S:
                    raise PlatformError(
                        f"the controller has died {RESTARTS} times in {RESTARTS_WINDOW_S:g} s; see {log.name}"
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
                (job.run_directory / "controller.pid").write_text(str(self._controller.pid))
                status = await self._controller.wait()
                result = read_result(job.job_directory)
                if result is not None:
                    return result
                _log.warning("the controller ended with status %d before the job was over; starting it again", status)

    def _end_controller(self) -> None:
        if self._controller is not None and self._controller.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._controller.kill()


async def _written_endpoint(run_directory: Path) -> str:
    """Return where the controller listens as soon as it has written that down."""
    changes = awatch(
        run_directory, watch_filter=None, step=5, rust_timeout=FILE_LOOK_MS, yield_on_timeout=True, recursive=False
    )
    async with contextlib.aclosing(changes):
        while True:
            endpoint = read_endpoint(run_directory)
            if endpoint is not None:
                return endpoint
            await anext(changes)


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait for it. The error of one that has failed is for whoever waits for its result."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


def _say_failure(watching: "asyncio.Task[None]") -> None:
    if not watching.cancelled() and (error := watching.exception()) is not None:
        _log.error("the fault sources are not watched any more, and the job continues without: %s", error)


def _remove(run_directory: Path) -> None:
    shutil.rmtree(run_directory, ignore_errors=True)
    if run_directory.exists():
        _log.error("%s could not be removed, and holds the job's keys: remove it", run_directory)
