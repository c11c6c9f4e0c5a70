"""Keeps a job on one machine alive: its controller, which `supervisor` keeps running, and the local platform.

The launcher decides nothing about recoveries. When it ends, whatever the signal, so does everything it started.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from ..controller.doors.notices import Result
from ..platforms.local import LocalOptions, LocalPlatform
from ..protocol.discovery import read_endpoint
from ..protocol.errors import PlatformError
from .fault_watch import watch_faults
from .job_start import Job
from .supervisor import Supervisor

_log = logging.getLogger(__name__)

# Status and new lines of logs are for a reader's eyes: nobody tells of them, and more often than this is not seen.
LOOK_S = 0.2
START_S = 60.0
STOP_MARGIN_S = 10.0


class Launcher:
    """Runs one job to its end. Use as `await Launcher(job).run()`."""

    def __init__(self, job: Job, look: Callable[[], None] = lambda: None) -> None:
        self._job = job
        self._look = look
        self._stops = 0
        self._supervisor: Supervisor | None = None

    async def run(self) -> Result:
        """Start controller and nodes, wait for the end, clear everything away, and return how the job ended.

        Raises PlatformError when the first controller does not come up; everything is cleared away then, too.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        platform: LocalPlatform | None = None
        self._supervisor = supervisor = Supervisor(self._job, guards=lambda: platform is None or platform.has_ranks())
        supervising = asyncio.create_task(supervisor.run())
        watching: asyncio.Task[None] | None = None
        try:
            endpoint = await self._endpoint(supervisor, supervising)
            if endpoint is None:
                return await supervising
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
            await supervisor.close()
            self._look()
            for path in self._job.held.remove():
                _log.warning("%s cannot be removed and is left", path)

    async def _endpoint(self, supervisor: Supervisor, supervising: "asyncio.Task[Result]") -> str | None:
        """Return where the job's first controller listens; None if the job is over already."""
        served = asyncio.create_task(supervisor.served.wait())
        try:
            await asyncio.wait([supervising, served], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(served)
        if supervising.done():
            return None
        endpoint = read_endpoint(self._job.run_directory)
        if endpoint is None:
            log = self._job.job_directory / "logs" / "controller.log"
            raise PlatformError(f"the controller does not come up; see {log}")
        return endpoint

    def _on_signal(self, number: int) -> None:
        self._stops += 1
        if self._stops == 1 and self._supervisor is not None:
            name = signal.Signals(number).name
            _log.warning("%s: asking the job to stop; once more ends it at once", name)
            self._supervisor.stop(f"midstep run received {name}")


async def _cancelled(task: "asyncio.Task[Any] | None") -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
