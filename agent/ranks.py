"""The training processes of a node: started, watched, hurt on purpose and ended as the controller says.

Commands are idempotent by the number of the incarnation that they are about, since they may come twice or out of order.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ..platforms.log_files import open_log
from ..protocol.blackbox import BlackBox
from ..protocol.errors import AgentError
from ..protocol.messages import (
    FaultReported,
    Message,
    ProcessExited,
    ProcessStarted,
    StartProcess,
    StopProcess,
)
from ..protocol.rank_logs import output_log
from ..protocol.types import (
    Activity,
    ArmedFault,
    FaultKind,
    FaultReport,
    Injury,
    JobSpec,
    RankProgress,
    RunningProcess,
    rank_address,
)
from . import orders
from .environment import rank_environment
from .kernel import is_stopped
from .nursery import Nursery
from .out_of_memory import KillCounter, MemoryKills
from .seats import Life, Seat
from .standbys import Standby

WELCOME_S = 60.0  # a start waits this long for the job's description, which may come after it
START_TRIES = 3  # standbys that may die between being taken and being told
DEATH_S = 10.0  # a killed process is gone by then, unless the kernel itself is stuck

_log = logging.getLogger(__name__)


class RankHost:
    """The ranks of one node. `post` sends a report to the controller."""

    def __init__(self, node: str, agent_socket: str, nursery: Nursery, *, post: Callable[[Message], None]) -> None:
        self._node = node
        self._agent_socket = agent_socket
        self._nursery = nursery
        self._post = post
        self._job: asyncio.Future[JobSpec] = asyncio.get_running_loop().create_future()
        self._seats: dict[int, Seat] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._counter = KillCounter()
        self._memory_kills = MemoryKills()

    def welcome(self, job: JobSpec) -> None:
        """The job is known. Again: nothing."""
        if not self._job.done():
            self._job.set_result(job)

    def start(self, order: StartProcess) -> None:
        """Start a rank's process, in the place of one that holds the rank. Answer with ProcessStarted or a fault."""
        self._spawn_task(self._start(order))

    def stop(self, order: StopProcess) -> None:
        """End a rank's process; ProcessExited follows."""
        seat = self._seats.get(order.rank)
        if seat is not None:
            seat.ordered = max(seat.ordered, order.incarnation)
            if seat.life is not None and seat.life.running.incarnation <= order.incarnation:
                self._end(seat.life, order.grace_s)

    def hurt(self, fault: ArmedFault) -> None:
        """Kill or stop a rank's process, on purpose and unannounced."""
        seat = self._seats.get(fault.rank)
        life = seat.life if seat is not None else None
        if life is None or life.process is None:
            _log.warning("no process of rank %d to %s", fault.rank, fault.injury)
        elif fault.incarnation not in {None, life.running.incarnation}:
            _log.warning("rank %d is not in incarnation %s any more", fault.rank, fault.incarnation)
        elif fault.injury in {Injury.KILL, Injury.STOP}:
            number = signal.SIGKILL if fault.injury is Injury.KILL else signal.SIGSTOP
            life.process.signal(number)
        else:
            _log.warning("an agent cannot do %s to a rank", fault.injury)

    def running(self) -> tuple[RunningProcess, ...]:
        """Name the processes that run now."""
        return tuple(life.running for life in self._lives())

    def progress(self) -> tuple[RankProgress, ...]:
        """Read the step clocks of the ranks that have a process."""
        clocks = ((life.running.pid, life.clock()) for life in self._lives())
        return tuple(
            msgspec.structs.replace(clock, suspended=is_stopped(pid)) for pid, clock in clocks if clock is not None
        )

    def watch_memory(self) -> None:
        """Take in whether the kernel has killed for lack of memory, on this node or, without cgroups, this machine."""
        self._memory_kills.observe(self._counter.read(), time.monotonic())

    def waiting(self, readings: Iterable[RankProgress]) -> tuple[RunningProcess, ...]:
        """Name, once each, the early processes that have reached their train function by these step clocks."""
        reached = {clock.rank: clock.incarnation for clock in readings if clock.activity is Activity.RECOVERING}
        early = [life for life in self._lives() if life.early]
        ready = [life for life in early if reached.get(life.running.rank) == life.running.incarnation]
        for life in ready:
            life.early = False
        return tuple(life.running for life in ready)

    def oldest_session(self, address: str) -> int | None:
        """Say from when on (ns) the sender at `address` may be heard; None: no such rank is here."""
        for rank, seat in self._seats.items():
            if rank_address(rank) == address:
                return seat.oldest_session
        return None

    async def end_all(self, grace_s: float) -> None:
        """End every process, and take no more orders. Return when all are gone, or DEATH_S after the kill."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        lives = list(self._lives())
        for life in lives:
            self._end(life, grace_s)
        await asyncio.gather(*(self._gone(life, grace_s + DEATH_S) for life in lives))

    def kill_all(self) -> None:
        """Kill every process now."""
        for life in self._lives():
            self._end(life, 0.0)

    def close(self) -> None:
        """Give the black boxes back. After `end_all`. Idempotent."""
        for seat in self._seats.values():
            seat.box.close()
        self._seats.clear()

    # --- inside -------------------------------------------------------------------------------------------------

    async def _start(self, order: StartProcess) -> None:
        try:
            job = await asyncio.wait_for(asyncio.shield(self._job), WELCOME_S)
            seat = self._seats.get(order.rank)
            if seat is None:
                box = BlackBox.create(order.rank, job.settings.black_box_bytes)
                seat = self._seats[order.rank] = Seat(box)
            if order.incarnation <= seat.ordered:
                return  # a repetition, or overtaken by a later order
            seat.ordered = order.incarnation
            async with seat.starting:
                if seat.ordered == order.incarnation:
                    await self._replace(seat, job, order)
        except (AgentError, OSError) as error:  # a TimeoutError is an OSError
            reason = str(error) or f"the job's description did not come within {WELCOME_S:.0f} s"
            _log.error("rank %d was not started: %s", order.rank, reason)
            self._report_failed_start(order, reason)

    async def _replace(self, seat: Seat, job: JobSpec, order: StartProcess) -> None:
        began_s = time.monotonic()
        if seat.life is not None:
            self._end(seat.life, 0.0)
            await self._gone(seat.life, DEATH_S)
        if seat.life is not None:
            raise AgentError(f"process {seat.life.running.pid} holds the rank and cannot be killed")
        environment = rank_environment(
            os.environ, job, order, node=self._node, agent_socket=self._agent_socket, started_s=began_s
        )
        training = orders.TrainingOrder(
            command=job.command,
            is_module=job.is_module,
            no_python=job.no_python,
            environment=environment,
            working_directory=job.working_directory,
        )
        log = output_log(job.job_directory, order.rank, order.incarnation)
        for left in reversed(range(START_TRIES)):
            standby = await self._nursery.take()
            if seat.ordered != order.incarnation or self._ending:
                standby.close()
                return
            try:
                self._begin_life(seat, order, training, standby, log)
            except AgentError as error:
                if not left:
                    raise
                _log.warning("rank %d: %s; taking another", order.rank, error)
            else:
                return

    def _begin_life(
        self, seat: Seat, order: StartProcess, training: orders.TrainingOrder, standby: Standby, log: Path
    ) -> None:
        seat.oldest_session = order.incarnation
        pid = standby.process.pid
        life = Life(seat, RunningProcess(order.rank, pid, order.incarnation, order.generation))
        life.early = order.early
        now = time.monotonic()
        seat.box.write_progress(
            pid=pid,
            incarnation=order.incarnation,
            generation=order.generation,
            step=0,
            activity=Activity.STARTING,
            collectives=0,
            activity_began_s=now,
            step_began_s=now,
            median_step_s=0.0,
        )
        output = open_log(log)
        try:
            life.process = standby.order(training, (seat.box.fd, output), lambda status: self._exited(life, status))
        finally:
            os.close(output)
        seat.life = life
        self._post(ProcessStarted(node=self._node, process=life.running, warm=standby.warm))

    def _exited(self, life: Life, status: int) -> None:
        at_s = time.time()
        if life.seat.life is life:
            life.seat.life = None
        self.watch_memory()
        killed = status == -signal.SIGKILL and not life.expected
        self._post(
            ProcessExited(
                node=self._node,
                process=life.running,
                status=status,
                at_s=at_s,
                expected=life.expected,
                last=life.clock(),
                out_of_memory=killed and self._memory_kills.claim(time.monotonic()),
            )
        )

    def _end(self, life: Life, grace_s: float) -> None:
        life.expected = True
        if life.process is None:
            return
        if grace_s <= 0 or is_stopped(life.running.pid):  # a stopped process would not hear SIGTERM
            life.process.kill()
        else:
            life.process.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_s, life.process.kill)

    async def _gone(self, life: Life, timeout_s: float) -> None:
        if life.process is not None and not await life.process.wait(timeout_s):
            _log.error("process %d of rank %d does not end", life.running.pid, life.running.rank)

    def _lives(self) -> Iterable[Life]:
        return (seat.life for seat in tuple(self._seats.values()) if seat.life is not None)

    def _report_failed_start(self, order: StartProcess, reason: str) -> None:
        self._post(
            FaultReported(
                FaultReport(
                    kind=FaultKind.START_FAILED,
                    at_s=time.time(),
                    seen_by=f"node/{self._node}",
                    detail=reason,
                    rank=order.rank,
                    node=self._node,
                    generation=order.generation,
                    incarnation=order.incarnation,
                )
            )
        )

    def _spawn_task(self, coroutine: "asyncio._CoroutineLike[None]") -> None:
        if self._ending:
            return
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
