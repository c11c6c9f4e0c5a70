"""The training processes of a node: start them, watch them, stop them, and inject faults, as the controller orders.

Orders are idempotent by the incarnation that they are about, since they may come twice or out of order. A rank's slot
outlives its processes: it has the black box, the present process, and the latest order.

A rank that the kernel killed for lack of memory exits by SIGKILL, as one does that something else killed. The kernel
counts its own kills for each memory cgroup, so a count that went up shortly before the exit names the cause.
"""

import asyncio
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from ..platforms.processes import WatchedProcess, open_log
from ..protocol import messages as m
from ..protocol import types as t
from ..protocol.blackbox import BlackBox
from ..protocol.bounds import fits
from ..protocol.compat import within
from ..protocol.errors import AgentError
from ..protocol.exits import is_left_to_launcher
from ..protocol.host_copies import FILES, copied_bytes, copied_steps, create_copy_files, guest_copies
from ..protocol.rank_logs import last_words, output_log
from ..protocol.reports import ReportedValues
from . import channel
from .build_choice import TrainingProcess
from .built_pool import Preparations, is_time
from .channel import rank_environment, rank_program
from .copy_writers import CopyWriters
from .link_use import LinkReader
from .linux import ignores, is_stopped
from .log_rules import FollowedLog, LogRules
from .rests import RestReader
from .warm_pool import IdleProcess, WarmPool

WELCOME_S = 60.0  # a start waits this long for the job's description, which may come after it
START_TRIES = 3  # idle processes that may exit between being taken and being assigned
EXIT_S = 10.0  # a killed process has exited by then, unless it hangs in the kernel
_log = logging.getLogger(__name__)
LAST_WRITTEN_S = 5.0  # what is being written when the job ends; less than an agent is given to end
REMEMBERED_S = 30.0  # from the kernel's decision to the exit of a process with hundreds of GB
MOST_KILLS = 1000
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_FIELD = "oom_kill"


class RankProcess:
    """One process of a rank. `watched` is set once it has its assignment."""

    __slots__ = ("early", "expected", "followed", "log", "program", "running", "slot", "started_s", "watched")

    def __init__(self, slot: "RankSlot", running: t.RunningProcess, log: Path, *, early: bool) -> None:
        """`log`: what it prints."""
        self.slot = slot
        self.log = log
        self.running = running
        self.started_s = time.monotonic()
        self.watched: WatchedProcess | None = None
        self.program: channel.RunProgram | None = None  # as `watched`
        self.expected = False  # its exit is: it has been ordered to end
        self.followed: FollowedLog | None = None  # its log, as `watched`
        self.early = early  # it gets ready while another process holds the rank, and has not been announced

    def clock(self) -> t.RankProgress | None:
        """Read the step clock. Returns None for a reading of another process, or one that its process has damaged."""
        reading = self.slot.box.read_progress(time.monotonic())
        if reading is None or reading.incarnation != self.running.incarnation:
            return None
        return reading if fits(reading) else None

    def reset_clock(self) -> None:
        """Write the step clock of a process that starts."""
        now = time.monotonic()
        self.slot.box.write_progress(
            pid=self.running.pid,
            incarnation=self.running.incarnation,
            generation=self.running.generation,
            step=0,
            activity=t.Activity.STARTING,
            collectives=0,
            activity_began_s=now,
            step_began_s=now,
            median_step_s=0.0,
        )

    def end(self, grace_s: float) -> None:
        """Ask the process to end, and kill it after `grace_s`."""
        self.expected = True
        if self.watched is None:
            return
        pid = self.running.pid
        is_deaf = is_stopped(pid) or (is_left_to_launcher() and ignores(pid, signal.SIGTERM))
        if grace_s <= 0 or is_deaf:  # SIGTERM would do nothing
            self.watched.kill()
        else:
            self.watched.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_s, self.watched.kill)

    async def wait(self, timeout_s: float) -> None:
        """Wait until the process has exited; log an error after `timeout_s`."""
        if self.watched is not None and not await self.watched.wait(timeout_s):
            _log.error("process %d of rank %d does not exit after SIGKILL", self.running.pid, self.running.rank)


class RankSlot:
    """A rank's slot on this node."""

    __slots__ = ("box", "copies", "oldest_session", "ordered", "process", "starting")

    def __init__(self, box: BlackBox, copies: tuple[int, ...] = ()) -> None:
        """`copies`: the files for copies of its state."""
        self.box = box
        self.copies = copies
        self.process: RankProcess | None = None
        self.ordered = -1  # the latest incarnation that a start or a stop was about
        self.oldest_session = 0
        self.starting = asyncio.Lock()


class RankHost:
    """The ranks of one node. `post` sends a report to the controller."""

    def __init__(self, node: str, agent_socket: str, pool: WarmPool, *, post: Callable[[m.Message], None]) -> None:
        self._node = node
        self._agent_socket = agent_socket
        self._pool = pool
        self._preparations = Preparations(node, agent_socket, pool, post=post)
        self._writers = CopyWriters(pool)
        self._links = LinkReader()
        self.rests = RestReader()
        self._post = post
        self._job: asyncio.Future[t.JobSpec] = asyncio.get_running_loop().create_future()
        self._slots: dict[int, RankSlot] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._log_rules = LogRules(node, post)
        self._counter = KillCounter()
        self._memory_kills = MemoryKills()

    def welcome(self, job: t.JobSpec) -> None:
        """Take over the job's description. A second one is ignored."""
        if not self._job.done():
            self._job.set_result(job)
            self._log_rules.start(job.settings.rules)

    def start(self, order: m.StartProcess) -> None:
        """Start a rank's process in place of the present one. Answers with ProcessStarted or a fault."""
        self._spawn_task(self._start(order))

    def stop(self, order: m.StopProcess) -> None:
        """End a rank's process; ProcessExited follows."""
        slot = self._slots.get(order.rank)
        if slot is not None:
            self._preparations.built.discard(order.rank)
            slot.ordered = max(slot.ordered, order.incarnation)
            if slot.process is not None and slot.process.running.incarnation <= order.incarnation:
                slot.process.end(order.grace_s)

    def inject(self, fault: t.ArmedFault) -> None:
        """Kill (SIGKILL) or stop (SIGSTOP) a rank's process to inject a fault; its exit is not marked as expected."""
        slot = self._slots.get(fault.rank)
        process = slot.process if slot is not None else None
        if process is None or process.watched is None:
            _log.warning("cannot inject %s: rank %d has no process on this node", fault.action, fault.rank)
        elif fault.incarnation not in {None, process.running.incarnation}:
            _log.warning(
                "cannot inject %s: rank %d is not in incarnation %s any more",
                fault.action,
                fault.rank,
                fault.incarnation,
            )
        elif fault.action in {t.FaultAction.KILL, t.FaultAction.STOP}:
            number = signal.SIGKILL if fault.action is t.FaultAction.KILL else signal.SIGSTOP
            process.watched.signal(number)
        else:
            _log.warning("an agent cannot inject %s into a rank", fault.action)

    def running(self) -> tuple[t.RunningProcess, ...]:
        """Return the processes that run now."""
        return tuple(process.running for process in self._processes())

    def numbers(self) -> list[int]:
        """Return the ranks that have a process here."""
        return [process.running.rank for process in self._processes()]

    def probe(self, number: int) -> None:
        """Report the step clocks as they are now."""
        self._post(m.ProgressReported(node=self._node, probe=number, at_s=time.time(), ranks=self.progress()))

    def progress(self) -> tuple[t.RankProgress, ...]:
        """Read the step clocks of the ranks that have a process."""
        clocks = ((process, process.clock()) for process in self._processes())
        return tuple(
            msgspec.structs.replace(
                self.rests.read(clock, process.running.pid),
                copied_steps=copied_steps(process.slot.copies, clock.rank),
                copied_bytes=copied_bytes(process.slot.copies),
                guest_copies=guest_copies(process.slot.copies, clock.rank),
            )
            for process, clock in clocks
            if clock is not None
        )

    def with_links(self, readings: tuple[t.RankProgress, ...], now: float) -> tuple[t.RankProgress, ...]:
        """Return step clocks with how busy the connections of their processes to other machines are."""
        running = (process.running for process in self._processes())
        return self._links.added(readings, {(each.rank, each.incarnation): each.pid for each in running}, now)

    def reported(self) -> ReportedValues | None:
        """Return what the lowest rank here that reports values has reported last, to be shown; None: none does."""
        found = ((process.running, process.slot.box.read_reported()) for process in self._processes())
        fresh = [
            told
            for running, told in found
            if told is not None and told.incarnation == running.incarnation and fits(told)
        ]
        return min(fresh, key=lambda told: told.rank, default=None)

    def write_copies(self) -> None:
        """Have copies written to disk that are to be checkpoints."""
        if self._job.done():
            job = self._job.result()
            for rank, slot in self._slots.items():
                self._writers.look(job, rank, slot.copies[:FILES])

    def logs(self) -> tuple[tuple[t.RunningProcess, Path], ...]:
        """Return the processes that run now, each with the file that has what it prints."""
        return tuple((process.running, process.log) for process in self._processes())

    def watch_memory(self) -> None:
        """Read whether the kernel's OOM killer has acted, on this node or, without cgroups, on this machine."""
        self._memory_kills.observe(self._counter.read(), time.monotonic())

    def waiting(self, readings: Iterable[t.RankProgress]) -> tuple[t.RunningProcess, ...]:
        """Return, once each, the early processes that have reached their train function by these step clocks."""
        reached = {clock.rank: clock.incarnation for clock in readings if clock.activity is t.Activity.RECOVERING}
        early = [process for process in self._processes() if process.early]
        ready = [process for process in early if reached.get(process.running.rank) == process.running.incarnation]
        for process in ready:
            process.early = False
        return tuple(process.running for process in ready)

    def build_ahead(self, order: m.BuildAhead) -> None:
        """Have processes built for ranks of other nodes."""
        self._preparations.take_order(order, self._here())

    def introduce(self) -> None:
        """Say again what is prepared here."""
        self._preparations.introduce()

    def prepare(self, readings: Iterable[t.RankProgress]) -> None:
        """Have the next process of each rank built, by these step clocks, once the rank has a usual step."""
        if not self._job.done() or self._ending:
            return
        ready = {clock.rank for clock in readings if is_time(clock)}
        training = {
            each.running.rank: TrainingProcess(each.program, each.running.pid, each.started_s)
            for each in self._processes()
            if each.running.rank in ready and each.program is not None
        }
        self._preparations.keep(self._job.result(), training, self._here())

    def oldest_session(self, address: str) -> int | None:
        """Return the oldest session that may send as `address`. None: this node does not have such a rank."""
        for rank, slot in self._slots.items():
            if t.rank_address(rank) == address:
                return slot.oldest_session
        return None

    async def end_all(self, grace_s: float) -> None:
        """End every process, and take no more orders. Returns when all have exited, or EXIT_S after the kill."""
        self._ending = True
        self._preparations.close()
        self._log_rules.close()
        for task in self._tasks:
            task.cancel()
        processes = list(self._processes())
        for process in processes:
            process.end(grace_s)
        await asyncio.gather(*(process.wait(grace_s + EXIT_S) for process in processes))
        self.write_copies()
        await self._writers.close(LAST_WRITTEN_S)

    def kill_all(self) -> None:
        """Kill every process now."""
        self._preparations.close()
        for process in self._processes():
            process.end(0.0)

    def close(self) -> None:
        """Free the black boxes, and the files for copies. Call it after `end_all`. Idempotent."""
        for slot in self._slots.values():
            slot.box.close()
            channel.close_all(list(slot.copies))
        self._slots.clear()

    # --- starting ---------------------------------------------------------------------------------------------------

    async def _start(self, order: m.StartProcess) -> None:
        try:
            job = await within(WELCOME_S, asyncio.shield(self._job))
            slot = self._slots.get(order.rank)
            if slot is None:
                box = BlackBox.create(order.rank, job.settings.black_box_bytes)
                nodes = job.settings.host_copy_nodes if job.settings.host_copies else 0
                copies = create_copy_files(order.rank, nodes)
                slot = self._slots[order.rank] = RankSlot(box, copies)
            if order.incarnation <= slot.ordered:
                return  # a repetition, or overtaken by a later order
            slot.ordered = order.incarnation
            async with slot.starting:
                if slot.ordered == order.incarnation:
                    await self._replace(slot, job, order)
        except (AgentError, OSError) as error:  # a TimeoutError is an OSError
            reason = str(error) or f"the job's description did not come within {WELCOME_S:.0f} s"
            _log.error("cannot start rank %d: %s", order.rank, reason)
            self._report_failed_start(order, reason)

    async def _replace(self, slot: RankSlot, job: t.JobSpec, order: m.StartProcess) -> None:
        began_s = time.monotonic()
        if slot.process is not None:
            slot.process.end(0.0)
            await slot.process.wait(EXIT_S)
        if slot.process is not None:
            raise AgentError(f"process {slot.process.running.pid} holds the rank and cannot be killed")
        environment = rank_environment(
            os.environ, job, order, node=self._node, agent_socket=self._agent_socket, started_s=began_s
        )
        assignment = rank_program(job, environment)
        log = output_log(job.job_directory, order.rank, order.incarnation)
        for left in reversed(range(START_TRIES)):
            idle = await self._preparations.built.take(order.rank, environment) or await self._pool.take()
            if slot.ordered != order.incarnation or self._ending:
                idle.close()
                return
            try:
                self._assign(slot, order, assignment, idle, log)
            except AgentError as error:
                if not left:
                    raise
                _log.warning("rank %d: %s; trying another process", order.rank, error)
            else:
                return

    def _assign(
        self, slot: RankSlot, order: m.StartProcess, assignment: channel.RunProgram, idle: IdleProcess, log: Path
    ) -> None:
        """Make an idle process the rank's. Raises AgentError when it has exited."""
        slot.oldest_session = order.incarnation
        running = t.RunningProcess(order.rank, idle.process.pid, order.incarnation, order.generation)
        process = RankProcess(slot, running, log, early=order.early)
        process.reset_clock()
        output = open_log(log)
        begin = os.fstat(output).st_size
        try:
            process.watched = idle.assign(
                assignment, (slot.box.fd, output, *slot.copies), lambda status: self._exited(process, status)
            )
        finally:
            os.close(output)
        process.program = assignment
        process.followed = self._log_rules.begin(running, process.clock, log, begin)
        slot.process = process
        self._post(m.ProcessStarted(node=self._node, process=running, warm=idle.warm))

    def _exited(self, process: RankProcess, status: int) -> None:
        at_s = time.time()
        if process.slot.process is process:
            process.slot.process = None
        self.watch_memory()
        killed = status == -signal.SIGKILL and not process.expected
        exited = m.ProcessExited(
            node=self._node,
            process=process.running,
            status=status,
            at_s=at_s,
            expected=process.expected,
            last=process.clock(),
            out_of_memory=killed and self._memory_kills.claim(time.monotonic()),
            output="",
        )

        def report(words: str) -> None:
            self._post(msgspec.structs.replace(exited, output=words))

        if process.followed is None or process.expected or self._ending:
            self._log_rules.forget(process.followed)
            report("")
        else:
            self._log_rules.end(process.followed, lambda: last_words(process.log) if status else "", report)

    def _here(self) -> frozenset[int]:
        return frozenset(process.running.rank for process in self._processes())

    def _processes(self) -> Iterable[RankProcess]:
        return (slot.process for slot in tuple(self._slots.values()) if slot.process is not None)

    def _report_failed_start(self, order: m.StartProcess, reason: str) -> None:
        report = t.FaultReport.of_rank(
            t.FaultKind.START_FAILED,
            reason,
            (order.rank, order.incarnation),
            node=self._node,
            generation=order.generation,
            seen_by=t.node_address(self._node),
            at_s=time.time(),
        )
        self._post(m.FaultReported(report))

    def _spawn_task(self, coroutine: "asyncio._CoroutineLike[None]") -> None:
        if self._ending:
            coroutine.close()  # or it would be warned of as never awaited
            return
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# --- kills for lack of memory ---------------------------------------------------------------------------------------


class MemoryKills:
    """Remembers OOM kills until the exits that they explain. Pure: counts and times are arguments."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._kills: deque[float] = deque(maxlen=MOST_KILLS)

    def observe(self, count: int | None, now: float) -> None:
        """Take in the kernel's count at `now`. Counting begins at the first one."""
        if count is None:
            return
        if self._count is not None:
            self._kills.extend([now] * min(count - self._count, MOST_KILLS))
        self._count = count

    def claim(self, now: float) -> bool:
        """Say whether a process that has just exited by SIGKILL was an OOM kill. Each kill explains one exit."""
        while self._kills and now - self._kills[0] > REMEMBERED_S:
            self._kills.popleft()
        if not self._kills:
            return False
        self._kills.popleft()
        return True


class KillCounter:
    """The kernel's count of OOM kills: of this process's memory cgroup (version 2 or 1), else of the machine."""

    def __init__(self, *, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        """Find the file that has the count. Without one `read` returns None, and no exit is called an OOM kill."""
        self._path = next((path for path in _candidates(cgroups, proc) if _read(path) is not None), None)

    def read(self) -> int | None:
        """Return the present count; None where it is not known."""
        return None if self._path is None else _read(self._path)


def parse_count(text: str) -> int | None:
    """Return the `oom_kill` count of `memory.events`, `memory.oom_control` or `vmstat`; None if it has none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == _FIELD and value.strip().isdecimal():
            return int(value)
    return None


def _candidates(cgroups: Path, proc: Path) -> Iterator[Path]:
    """Yield the files that may have the count, the closest first. In a container the mount may be the group itself."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            place, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            place, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        yield place / path.lstrip("/") / name
        yield place / name
    yield proc / "vmstat"


def _read(path: Path) -> int | None:
    try:
        return parse_count(path.read_text())
    except (OSError, UnicodeDecodeError):
        return None
