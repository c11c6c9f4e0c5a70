"""Keeps the part of a job alive that is on this machine: its agent, and its controller where this machine runs that."""

import asyncio
import contextlib
import logging
import os
import time

from ...controller.endpoints.discovery_files import JobResult
from ...protocol.errors import PlatformError
from ..joining.machine import JoiningMachine
from .agent_process import AgentProcess
from .fault_watch import watch_faults
from .launcher import cancelled, controller_serves, say_failure
from .stop_signals import StopSignals
from .supervisor import Supervisor

INTERRUPTED = 130
_AGENT_LOG = "agent.log"

_log = logging.getLogger(__name__)


class JoinedLauncher:
    """Runs the part of one machine to its end. Use as `await JoinedLauncher(machine).run()`."""

    def __init__(self, machine: JoiningMachine) -> None:
        self._machine = machine
        self._agent: AgentProcess | None = None
        self._supervisor: Supervisor | None = None

    async def run(self) -> JobResult:
        """Start the agent, and the controller if this is its machine; wait for the end, and clear everything away.

        Raises PlatformError when a controller of this machine does not come up.
        """
        async with contextlib.AsyncExitStack() as ending:
            ending.callback(self._remove)
            supervising = await self._supervise(ending)
            stop = ending.enter_context(StopSignals(self._stop, self._what_a_signal_does))
            if supervising is not None and not await self._served(supervising, stop):
                return await self._result(supervising, stop)
            self._agent = agent = await self._start_agent()
            ending.push_async_callback(agent.close, self._machine.grace_s)
            own = asyncio.create_task(self._agent_result(agent))
            ending.push_async_callback(cancelled, own)
            if supervising is None:
                return await self._result(own, stop)
            own.add_done_callback(self._warn_of_agent)
            result = await self._result(supervising, stop)
            await asyncio.wait([own], timeout=self._machine.grace_s)  # it has been ordered to end, too
            return result

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _what_a_signal_does(self) -> str:
        if self._machine.job is not None:
            return "asking the job to stop"
        if self._machine.signals_all:
            return "the machine with the controller stops the job"
        return "this machine leaves the job"

    async def _supervise(self, ending: contextlib.AsyncExitStack) -> "asyncio.Task[JobResult] | None":
        job = self._machine.job
        if job is None:
            return None
        self._supervisor = supervisor = Supervisor(job)
        ending.push_async_callback(supervisor.close)
        supervising = asyncio.create_task(supervisor.run())
        ending.push_async_callback(cancelled, supervising)
        if job.fault_sources:
            watching = asyncio.create_task(watch_faults(job))
            watching.add_done_callback(say_failure)
            ending.push_async_callback(cancelled, watching)
        return supervising

    async def _served(self, supervising: "asyncio.Task[JobResult]", stop: StopSignals) -> bool:
        """Wait for the controller; False when the job is over already, or is to end at once."""
        assert self._supervisor is not None
        assert self._machine.job is not None
        if not await controller_serves(self._supervisor, supervising, stop):
            return False
        if not self._supervisor.served.is_set():
            log = self._machine.job.job_directory / "logs" / "controller.log"
            raise PlatformError(f"the controller does not come up; see {log}")
        return True

    async def _start_agent(self) -> AgentProcess:
        machine, wishes = self._machine, self._machine.wishes
        arguments = {
            "--job": machine.name,
            "--controller": machine.endpoint,
            "--log-dir": str(machine.directory),
            "--program": str(machine.program),
            "--join-timeout": str(machine.join_s),
            "--node": wishes.node,
            "--failure-domain": wishes.failure_domain,
            "--host": wishes.host,
        }
        return await AgentProcess.start(
            [each for option, value in arguments.items() if value for each in (option, value)],
            token=machine.token,
            environment=dict(os.environ),
            log=machine.directory / "logs" / _AGENT_LOG,
            run_directory=machine.held.path,
        )

    async def _agent_result(self, agent: AgentProcess) -> JobResult:
        end = await agent.ended()
        return JobResult(self._machine.name, end.exit_code, end.reason, 0, time.time())

    async def _result(self, ending: "asyncio.Task[JobResult]", stop: StopSignals) -> JobResult:
        insisting = asyncio.create_task(stop.insisted.wait())
        await asyncio.wait([ending, insisting], return_when=asyncio.FIRST_COMPLETED)
        await cancelled(insisting)
        if not ending.done():
            return JobResult(self._machine.name, INTERRUPTED, "interrupted twice: ended at once", 0, time.time())
        return await ending

    def _stop(self, reason: str) -> None:
        """End the job where this machine runs its controller; else leave it, unless that machine is signalled, too."""
        if self._supervisor is not None:
            self._supervisor.stop(reason)
        elif self._agent is not None and not self._machine.signals_all:
            self._agent.leave()

    def _warn_of_agent(self, own: "asyncio.Task[JobResult]") -> None:
        if own.cancelled() or own.exception() is not None:
            return
        result = own.result()
        if result.exit_code != 0:
            _log.warning("%s; the controller of the job continues here", result.reason)

    def _remove(self) -> None:
        for path in self._machine.held.remove():
            _log.error("%s cannot be removed, and may hold keys of the job: remove it", path)
