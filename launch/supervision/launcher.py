"""Keeps a job on one machine alive: its controllers, by way of a supervisor, and the local platform.

The launcher decides nothing about recoveries. When it ends, whatever the signal, so does everything it started.
"""

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

from ...controller.endpoints.control_requests import StatusReply, StatusRequest
from ...controller.endpoints.discovery_files import JobResult
from ...controller.endpoints.local_sockets import NoController, ask
from ...controller.recovery.world import NodeState
from ...platforms.local import LocalOptions, LocalPlatform
from ...protocol.discovery import read_endpoint
from ...protocol.errors import PlatformError
from ..jobs.start import PreparedJob
from .fault_watch import watch_faults
from .stop_signals import StopSignals
from .supervisor import Supervisor

_log = logging.getLogger(__name__)

START_S = 60.0
LOOK_S = 0.1
ASK_S = 1.0
STOP_MARGIN_S = 10.0


class Launcher:
    """Runs one job to its end. Use as `await Launcher(job).run()`."""

    def __init__(self, job: PreparedJob) -> None:
        self._job = job
        self._platform: LocalPlatform | None = None

    async def run(self) -> JobResult:
        """Start controller and nodes, wait for the end, clear everything away, and return how the job ended.

        Raises PlatformError when the first controller does not come up. Everything is cleared away then, too, and
        whatever else fails: each part by itself, the keys last.
        """
        async with contextlib.AsyncExitStack() as ending:
            ending.callback(self._remove)
            supervisor = Supervisor(self._job, guards=lambda: self._platform is None or self._platform.has_ranks())
            ending.push_async_callback(supervisor.close)
            stop = ending.enter_context(StopSignals(supervisor.stop))
            supervising = asyncio.create_task(supervisor.run())
            ending.push_async_callback(cancelled, supervising)
            endpoint = await self._endpoint(supervisor, supervising, stop)
            if endpoint is None:
                return await self._result(supervising, stop)
            spec = self._job.spec
            self._platform = platform = LocalPlatform(
                LocalOptions(
                    job=spec.job,
                    controller=endpoint,
                    keys=str(self._job.run_directory / "keys"),
                    run_directory=str(self._job.run_directory),
                    log_directory=str(self._job.job_directory / "logs"),
                    grace_s=spec.settings.stop_grace_s + STOP_MARGIN_S,
                    can_create=self._job.can_create_nodes,
                    session=0 if self._job.before is None else self._job.before.session,
                ),
                # What an agent imports for its ranks it imports in their environment, and at once.
                environment={**os.environ, **spec.environment},
            )
            ending.push_async_callback(platform.close)
            ending.push_async_callback(cancelled, supervising)  # before the nodes leave, which is no fault then
            if self._job.before is None:
                platform.start(spec.nodes + spec.spare_nodes)
            else:
                platform.start_more(self._job.before.nodes)
                await self._joined(self._job.before.nodes)
                platform.report_lost(self._job.before.lost)
            if self._job.fault_sources:
                watching = asyncio.create_task(watch_faults(self._job))
                watching.add_done_callback(say_failure)
                ending.push_async_callback(cancelled, watching)
            return await self._result(supervising, stop)

    async def _result(self, supervising: "asyncio.Task[JobResult]", stop: StopSignals) -> JobResult:
        insisting = asyncio.create_task(stop.insisted.wait())
        await asyncio.wait([supervising, insisting], return_when=asyncio.FIRST_COMPLETED)
        await cancelled(insisting)
        if not supervising.done():
            return JobResult(self._job.spec.job, 130, "interrupted twice: ended at once", 0, time.time())
        return await supervising

    async def _endpoint(
        self, supervisor: Supervisor, supervising: "asyncio.Task[JobResult]", stop: StopSignals
    ) -> str | None:
        """Return where the job's first controller listens; None if the job is over already, or is to end at once."""
        if not await controller_serves(supervisor, supervising, stop):
            return None
        endpoint = read_endpoint(self._job.run_directory)
        if endpoint is None:
            log = self._job.job_directory / "logs" / "controller.log"
            raise PlatformError(f"the controller does not come up; see {log}")
        return endpoint

    async def _joined(self, nodes: tuple[str, ...]) -> None:
        """Wait up to START_S for nodes to join: the loss of others is answered by what is there then."""
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and not set(nodes) <= await asyncio.to_thread(self._known_nodes):
            await asyncio.sleep(LOOK_S)

    def _known_nodes(self) -> set[str]:
        """Return the nodes whose agents have joined."""
        try:
            reply = ask(self._job.run_directory, StatusRequest(), ASK_S)
        except NoController:
            return set()
        if not isinstance(reply, StatusReply):
            return set()
        return {node.node for node in reply.status.nodes if node.state != NodeState.REQUESTED.value}

    def _remove(self) -> None:
        for path in self._job.held.remove():
            _log.error("%s cannot be removed, and may hold keys of the job: remove it", path)


async def controller_serves(supervisor: Supervisor, supervising: "asyncio.Task[JobResult]", stop: StopSignals) -> bool:
    """Wait up to START_S for the first controller; False when the job is over already, or is to end at once."""
    waiting = [asyncio.create_task(event.wait()) for event in (supervisor.served, stop.insisted)]
    try:
        await asyncio.wait([supervising, *waiting], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            await cancelled(task)
    return not (supervising.done() or stop.insisted.is_set())


async def cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait for it. The error of a failed task belongs to the code that waits for its result."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


def say_failure(watching: "asyncio.Task[None]") -> None:
    """Say why the fault sources are not watched any more."""
    if not watching.cancelled() and (error := watching.exception()) is not None:
        _log.error("the fault sources are not watched any more, and the job continues without: %s", error)
