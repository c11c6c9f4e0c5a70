"""Keeps what this machine has of a job running: controllers by way of a supervisor, nodes, and the watch over faults.

The launcher decides nothing about recoveries. When it ends, whatever the signal, so does everything it started.

`midstep detect` watches the fault sources in a process of its own, so that no document, however it is written, can
disturb the controller. It gives signs of life: a detector that reads nothing for long is ended and started again, as is
one that dies, with growing pauses and without a limit. Until the next one has read everything, the job's status shows a
fault that says so.
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
from typing import Any, BinaryIO

from ..agent.linux import die_with_parent
from ..controller.endpoints.control_requests import StatusReply, StatusRequest
from ..controller.endpoints.discovery_files import JobResult
from ..controller.endpoints.local_sockets import NoController, ask
from ..controller.recovery.world import NodeState
from ..detectors.files import Sign
from ..detectors.reporter import FaultReporter
from ..platforms.local import LocalOptions, LocalPlatform
from ..platforms.processes import open_log
from ..protocol.compat import within
from ..protocol.discovery import read_endpoint
from ..protocol.errors import MidstepError, PlatformError
from ..protocol.keys import JobKeys
from ..protocol.own_programs import KILLED_S, end, own_program
from ..protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, detector_address
from .job import PreparedJob
from .joining import JoiningMachine
from .processes import AgentProcess, Backoff, RestartBackoff, StopSignals
from .supervisor import Supervisor

_log = logging.getLogger(__name__)
START_S = 60.0
LOOK_S = 0.1
ASK_S = 1.0
STOP_MARGIN_S = 10.0
INTERRUPTED = 130
_AGENT_LOG = "agent.log"
WATCH_NAME = "watch"  # the name under which the launcher reports that nothing watches
FAULT_ID = "fault-watch"
_KEYS = "keys"
DETECTOR_BACKOFF = Backoff(first_s=0.5)  # one that ends at once must not take a core
SILENCE_S = 60.0  # without a sign of life; one file takes some seconds at most
_READ_BYTES = 4096


class Launcher:
    """Runs what this machine has of a job to its end. Use as `await Launcher(job).run()`.

    Of a job on this machine alone that is everything: the controllers, by way of a supervisor, and all nodes. Of a job
    on several it is one agent, and the controllers where this machine runs them.
    """

    def __init__(
        self, part: PreparedJob | JoiningMachine, *, stop_signals: frozenset[signal.Signals] = frozenset()
    ) -> None:
        """`stop_signals`: what is heard as SIGTERM is."""
        self._stop_signals = stop_signals
        self._machine = part if isinstance(part, JoiningMachine) else None
        self._job = part.job if isinstance(part, JoiningMachine) else part
        self._held = part.held
        self._name = part.name
        self._supervisor: Supervisor | None = None
        self._platform: LocalPlatform | None = None
        self._agent: AgentProcess | None = None

    async def run(self) -> JobResult:
        """Start what this machine has of the job, wait for the end, clear everything away; return how the job ended.

        Raises PlatformError when the first controller does not come up. Everything is cleared away then, too, and
        whatever else fails: each part by itself, the keys last.
        """
        async with contextlib.AsyncExitStack() as ending:
            ending.callback(self._remove)
            supervising = None if self._job is None else self._supervise(self._job, ending)
            stop = ending.enter_context(StopSignals(self._stop, self._what_a_signal_does, self._stop_signals))
            if supervising is not None and not await self._served(supervising, stop):
                return await self._result(supervising, stop)
            if self._machine is None:
                assert self._job is not None
                assert supervising is not None
                await self._start_nodes(self._job, supervising, ending)
                await self._watch_faults(ending)
                return await self._result(supervising, stop)
            agent = await self._start_agent(self._machine, ending)
            if supervising is None:
                return await self._result(agent, stop)
            agent.add_done_callback(self._warn_of_agent)
            await self._watch_faults(ending)
            result = await self._result(supervising, stop)
            await asyncio.wait([agent], timeout=self._machine.grace_s)  # it has been ordered to end, too
            return result

    # --- the controller ---------------------------------------------------------------------------------------------

    def _supervise(self, job: PreparedJob, ending: contextlib.AsyncExitStack) -> "asyncio.Task[JobResult]":
        self._supervisor = supervisor = Supervisor(job, guards=self._has_ranks)
        ending.push_async_callback(supervisor.close)
        supervising = asyncio.create_task(supervisor.run())
        ending.push_async_callback(cancelled, supervising)
        return supervising

    def _has_ranks(self) -> bool:
        """Tell whether a controller would guard a training process; those of other machines are not seen from here."""
        return self._platform is None or self._platform.has_ranks()

    async def _served(self, supervising: "asyncio.Task[JobResult]", stop: StopSignals) -> bool:
        """Wait up to START_S for the first controller; False when the job is over already, or is to end at once."""
        assert self._supervisor is not None
        assert self._job is not None
        served = self._supervisor.served
        waiting = [asyncio.create_task(event.wait()) for event in (served, stop.insisted)]
        try:
            await asyncio.wait([supervising, *waiting], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                await cancelled(task)
        if supervising.done() or stop.insisted.is_set():
            return False
        if not served.is_set():
            log = self._job.job_directory / "logs" / "controller.log"
            raise PlatformError(f"the controller does not come up; see {log}")
        return True

    async def _watch_faults(self, ending: contextlib.AsyncExitStack) -> None:
        assert self._job is not None
        if self._job.fault_sources:
            watching = asyncio.create_task(watch_faults(self._job))
            watching.add_done_callback(say_failure)
            ending.push_async_callback(cancelled, watching)

    # --- the nodes of a job on this machine -------------------------------------------------------------------------

    async def _start_nodes(
        self, job: PreparedJob, supervising: "asyncio.Task[JobResult]", ending: contextlib.AsyncExitStack
    ) -> None:
        spec, run_directory = job.spec, job.run_directory
        endpoint = read_endpoint(run_directory)
        assert endpoint is not None, "a controller that serves has said where"
        self._platform = platform = LocalPlatform(
            LocalOptions(
                job=spec.job,
                controller=endpoint,
                keys=str(run_directory / "keys"),
                run_directory=str(run_directory),
                log_directory=str(job.job_directory / "logs"),
                grace_s=spec.settings.stop_grace_s + STOP_MARGIN_S,
                can_create=job.can_create_nodes,
                session=0 if job.before is None else job.before.session,
            ),
            # What an agent imports for its ranks it imports in their environment, and at once.
            environment={**os.environ, **spec.environment},
        )
        ending.push_async_callback(platform.close)
        ending.push_async_callback(cancelled, supervising)  # before the nodes leave, which is no fault then
        if job.before is None:
            platform.start(spec.nodes + spec.spare_nodes)
        else:
            platform.start_more(job.before.nodes)
            await self._joined(run_directory, job.before.nodes)
            platform.report_lost(job.before.lost)

    async def _joined(self, run_directory: Path, nodes: tuple[str, ...]) -> None:
        """Wait up to START_S for nodes to join: the loss of others is answered by what is there then."""
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and not set(nodes) <= await asyncio.to_thread(known_nodes, run_directory):
            await asyncio.sleep(LOOK_S)

    # --- the agent of a machine that joins a job --------------------------------------------------------------------

    async def _start_agent(
        self, machine: JoiningMachine, ending: contextlib.AsyncExitStack
    ) -> "asyncio.Task[JobResult]":
        wishes = machine.wishes
        arguments = {
            "--job": machine.name,
            "--controller": machine.endpoint,
            "--proxy": ",".join(wishes.proxies),
            "--log-dir": str(machine.directory),
            "--program": str(machine.program),
            "--join-timeout": str(machine.join_s),
            "--node": wishes.node,
            "--failure-domain": wishes.failure_domain,
            "--host": wishes.host,
        }
        self._agent = agent = await AgentProcess.start(
            [each for option, value in arguments.items() if value for each in (option, value)],
            token=machine.token,
            environment=dict(os.environ),
            log=machine.directory / "logs" / _AGENT_LOG,
            run_directory=machine.held.path,
        )
        ending.push_async_callback(agent.close, machine.grace_s)
        own = asyncio.create_task(self._agent_result(agent))
        ending.push_async_callback(cancelled, own)
        return own

    async def _agent_result(self, agent: AgentProcess) -> JobResult:
        end = await agent.ended()
        return JobResult(self._name, end.exit_code, end.reason, 0, time.time())

    def _warn_of_agent(self, own: "asyncio.Task[JobResult]") -> None:
        if own.cancelled() or own.exception() is not None:
            return
        result = own.result()
        if result.exit_code != 0:
            _log.warning("%s; the controller of the job continues here", result.reason)

    # --- the end ----------------------------------------------------------------------------------------------------

    @property
    def _what_a_signal_does(self) -> str:
        if self._job is not None:
            return "asking the job to stop"
        if self._machine is not None and self._machine.signals_all:
            return "the machine with the controller stops the job"
        return "this machine leaves the job"

    def _stop(self, reason: str) -> None:
        """End the job where this machine runs its controller; else leave it, unless that machine is signalled, too."""
        if self._supervisor is not None:
            self._supervisor.stop(reason)
        elif self._agent is not None and self._machine is not None and not self._machine.signals_all:
            self._agent.leave()

    async def _result(self, ending: "asyncio.Task[JobResult]", stop: StopSignals) -> JobResult:
        insisting = asyncio.create_task(stop.insisted.wait())
        await asyncio.wait([ending, insisting], return_when=asyncio.FIRST_COMPLETED)
        await cancelled(insisting)
        if not ending.done():
            return JobResult(self._name, INTERRUPTED, "interrupted twice: ended at once", 0, time.time())
        return await ending

    def _remove(self) -> None:
        for path in self._held.remove():
            _log.error("%s cannot be removed, and may hold keys of the job: remove it", path)


def known_nodes(run_directory: Path) -> set[str]:
    """Return the nodes whose agents have joined a job."""
    try:
        reply = ask(run_directory, StatusRequest(), ASK_S)
    except NoController:
        return set()
    if not isinstance(reply, StatusReply):
        return set()
    return {node.node for node in reply.status.nodes if node.state != NodeState.REQUESTED.value}


async def cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait for it. The error of a failed task belongs to the code that waits for its result."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


def say_failure(watching: "asyncio.Task[None]") -> None:
    """Log why the fault sources are not watched any more."""
    if not watching.cancelled() and (error := watching.exception()) is not None:
        _log.error("the fault sources are not watched any more, and the job continues without: %s", error)


async def watch_faults(job: PreparedJob) -> None:
    """Run the detector of a job's fault sources until cancelled, again and again when it ends."""
    while True:
        try:
            await _watch(job)
        except (MidstepError, OSError) as error:  # the disk is full, for one: there may be room later
            _log.error("nothing watches the fault sources, trying again in %g s: %s", DETECTOR_BACKOFF.longest_s, error)
            await asyncio.sleep(DETECTOR_BACKOFF.longest_s)


async def _watch(job: PreparedJob) -> None:
    keys = job.run_directory / _KEYS
    JobKeys.add(keys, detector_address(WATCH_NAME))
    endpoint = read_endpoint(job.run_directory)
    if endpoint is None:
        raise MidstepError(f"{job.run_directory}: no controller has come up, so faults cannot be reported to it")
    path = job.job_directory / "logs" / "detect.log"
    with open(open_log(path), "ab", buffering=0) as log:
        lookup = partial(read_endpoint, job.run_directory)
        async with FaultReporter(job.spec.job, endpoint, WATCH_NAME, keys, lookup=lookup) as reporter:
            await _FaultWatch(job, log, path, reporter).keep()


class _FaultWatch:
    """The watch of one job, over all its processes."""

    def __init__(self, job: PreparedJob, log: BinaryIO, path: Path, reporter: FaultReporter) -> None:
        self._job = job
        self._log = log
        self._path = path
        self._reporter = reporter
        self._down = False

    async def keep(self) -> None:
        """Start the detector whenever there is none."""
        waits = RestartBackoff(DETECTOR_BACKOFF)
        while True:
            began_s = time.monotonic()
            why = await self._one_process()
            pause_s = waits.delay_s(time.monotonic() - began_s, random.random())
            self._report_down(f"`midstep detect` {why}; it is started again after a pause, see {self._path}")
            await asyncio.sleep(pause_s)

    async def _one_process(self) -> str:
        """Start a detector, see it to its end, and return how it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(*own_program("midstep.cli.main"), "detect", "--signs", *self._options()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:  # no process can be had: there may be one later
            return f"cannot be started: {error}"
        try:
            return await self._signs_of(process)
        finally:
            await end(process)

    def _options(self) -> list[str]:
        options = [argument for source in self._job.fault_sources for argument in ("--source", str(source))]
        for name, node in self._job.policy.faults.named_nodes.items():
            options += ["--node-name", f"{name}={node}"]
        return [*options, "--", str(self._job.job_directory)]

    async def _signs_of(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        while True:
            try:
                signs = await within(SILENCE_S, process.stdout.read(_READ_BYTES))
            except TimeoutError:
                return f"has looked at no file for {SILENCE_S:g} s"
            if not signs:
                with contextlib.suppress(TimeoutError):
                    await within(KILLED_S, process.wait())
                return f"ended with status {process.returncode}"
            if Sign.LOOKED.encode() in signs:
                self._report_up()

    def _report_down(self, why: str) -> None:
        _log.warning("nothing watches the fault sources: %s", why)
        if not self._down:
            self._down = True
            self._tell(f"nothing watches the fault sources: {why}", Assertion.OCCUR)

    def _report_up(self) -> None:
        if self._down:
            self._down = False
            self._tell("the fault sources are watched again", Assertion.RECOVER)

    def _tell(self, detail: str, assertion: Assertion) -> None:
        self._reporter.tell(
            FaultReport(
                kind=FaultKind.DETECTOR,
                at_s=time.time(),
                seen_by=detector_address(WATCH_NAME),
                detail=detail,
                level=FaultLevel.NOT_HANDLE,
                fault_id=FAULT_ID,
                assertion=assertion,
            )
        )
