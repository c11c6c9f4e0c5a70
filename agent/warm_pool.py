"""The warm pool of a node: gives out processes that are up and wait for their assignment.

A restart of a rank must cost a fork and not an import. So one process is kept forked ahead, and the next is forked when
the recovery that took it is over. Without a fork server a process starts cold, as a new interpreter.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple

import psutil

from ..platforms.processes import ChildReaper, WatchedProcess
from ..protocol.compat import within
from ..protocol.errors import AgentError
from . import channel
from .fork_server_host import ForkServerHost, receive, spawn
from .linux import is_stopped

UP_S = 120.0  # for a process to be up, the fork server's imports included
REFILL_AFTER_S = 2.0
ANSWER_S = 5.0
BUILD_S = 600.0  # for a script to come to its train function: it may load data first

_log = logging.getLogger(__name__)


class IdleProcess:
    """A process that is up and waits for its assignment. Give it one with `assign`, or `close` it: then it ends."""

    def __init__(self, end: socket.socket, process: WatchedProcess, *, warm: bool) -> None:
        self.process = process
        self.warm = warm
        self.is_built = False  # its program stands at the train function
        self._end = end

    async def build(self, program: channel.RunProgram, log: int) -> None:
        """Have a program run up to its train function; what it prints until then goes to `log`.

        Raises AgentError when the process ends before that, or is elsewhere after BUILD_S. Then it is to be killed.
        """
        channel.send(self._end, channel.BuildProgram(program), (log,))
        try:
            received = await within(BUILD_S, receive(self._end))
        except TimeoutError:
            raise AgentError(f"it has not called a resilient train function within {BUILD_S:.0f} s") from None
        if received is None or not isinstance(received[0], channel.ProgramBuilt):
            raise AgentError("it has ended before its train function")
        self.is_built = True

    def assign(
        self, assignment: channel.Assignment, fds: tuple[int, ...], on_exit: Callable[[int], None]
    ) -> WatchedProcess:
        """Hand over the assignment; the process is the caller's from then on. Raises AgentError when it has ended."""
        try:
            if not self.process.alive:
                raise AgentError(f"idle process {self.process.pid} ended with status {self.process.status}")
            if self.is_built and isinstance(assignment, channel.RunProgram):
                assignment = channel.TakeRank(assignment.environment)
            channel.send(self._end, assignment, fds)
        finally:
            self.close()
        self.process.on_exit = on_exit
        return self.process

    async def answers(self, timeout_s: float) -> bool:
        """Say whether the process runs and answers a ping. If it does not, kill it and close the channel."""
        try:
            if self.process.alive and not is_stopped(self.process.pid):
                channel.send(self._end, channel.Ping())
                if await within(timeout_s, receive(self._end)) is not None:
                    return True
        except (AgentError, TimeoutError, OSError) as error:
            _log.warning("idle process %d does not answer, so it is killed: %s", self.process.pid, error)
        self.process.kill()
        self.close()
        return False

    def close(self) -> None:
        """Close the channel. A process without an assignment ends by that. Idempotent."""
        self._end.close()


class ImportCost(NamedTuple):
    """The cost of the imports that are done ahead: seconds, and a share of the memory that forks have in common."""

    imports_s: float
    memory_bytes: int


class WarmPool:
    """Gives out idle processes, and keeps one forked ahead. `environment` is what they start with."""

    def __init__(self, environment: Mapping[str, str], reaper: ChildReaper) -> None:
        self._environment = dict(environment)
        self._reaper = reaper
        self._server = ForkServerHost(reaper, on_up=self._server_up, on_stop=self._discard_kept)
        self._kept: IdleProcess | None = None
        self._refill: asyncio.TimerHandle | None = None
        self._filling: asyncio.Task[None] | None = None
        self._keep = False  # whether to keep a process forked ahead: not before the job is known
        self._closed = False

    def start(self) -> None:
        """Start the fork server, which begins to import."""
        self._server.start(self._environment)

    def configure(
        self, environment: Mapping[str, str], modules: tuple[str, ...], paths: tuple[str, ...], *, warm: bool
    ) -> None:
        """Take over the job's environment and modules to preload. `warm` False: fork nothing, start all cold.

        A fork server that was started in another environment is replaced, since what it imported may have read it.
        """
        self._keep = warm
        preload = channel.Preload(modules, paths) if modules and warm else None
        if dict(environment) != self._environment or not warm:
            self._environment = dict(environment)
            self._server.stop()
            if warm:
                self._server.start(self._environment, preload)
        else:
            self._server.preload(preload)
        self._refill_later(0.0)

    async def take(self, *, early: bool = False) -> IdleProcess:
        """Return an idle process: the one kept, else a fork, else a new interpreter.

        Waits for the first imports of the fork server, which each process would do for itself otherwise. `early`:
        torch alone is enough, as for the store's process.

        Raises AgentError when no process can be started.
        """
        kept, self._kept = self._kept, None
        self._refill_later(REFILL_AFTER_S)
        if kept is not None and await kept.answers(ANSWER_S):
            return kept
        if not early:
            await self._server.first_imports()
        if self._server.can_fork():
            try:
                return await self._fork(backends=not early)
            except AgentError as error:
                _log.warning("no fork, so a process starts as a new interpreter: %s", error)
        return await self._start_cold()

    def cost(self) -> ImportCost | None:
        """Return what the fork server and the process that is kept have taken; None while there is none."""
        server = self._server.pid
        if self._kept is None or server is None:
            return None
        try:
            memory = [psutil.Process(pid).memory_full_info().pss for pid in (server, self._kept.process.pid)]
        except psutil.Error:  # one of them has just ended
            return None
        return ImportCost(self._server.imports_s, sum(memory))

    def close(self) -> None:
        """End the fork server and the process that is kept. Idempotent."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
        if self._refill is not None:
            self._refill.cancel()
        self._server.stop()

    async def _fork(self, *, backends: bool) -> IdleProcess:
        end, theirs = channel.pair()
        with self._reaper.expecting():
            try:
                self._server.fork(theirs, backends=backends)
            except AgentError:
                end.close()
                raise
            finally:
                theirs.close()
            return await _until_up(end, self._watch, warm=True)

    async def _start_cold(self) -> IdleProcess:
        pid, end = spawn("training_process", self._environment)
        process = self._watch(pid)
        try:
            return await _until_up(end, lambda _: process, warm=False)
        except BaseException:
            process.kill()
            raise

    def _watch(self, pid: int) -> WatchedProcess:
        return self._reaper.watch(pid, _idle_process_exited)

    def _server_up(self) -> None:
        if self._refill is None:
            self._refill_later(0.0)

    def _discard_kept(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _refill_later(self, delay_s: float) -> None:
        if self._refill is not None:
            self._refill.cancel()
        if not self._closed:
            self._refill = asyncio.get_running_loop().call_later(delay_s, self._begin_refill)

    def _begin_refill(self) -> None:
        self._refill = None
        wanted = self._keep and self._kept is None and self._server.is_up
        if wanted and (self._filling is None or self._filling.done()) and not self._closed:
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        try:
            forked = await self._fork(backends=True)
        except AgentError as error:
            _log.info("no process is kept forked ahead: %s", error)
            return
        if self._kept is None and not self._closed:
            self._kept = forked
        else:
            forked.close()


async def _until_up(end: socket.socket, watch: Callable[[int], WatchedProcess], *, warm: bool) -> IdleProcess:
    """Wait for the process at the other end of a channel to be up; `watch` is called with its pid.

    Raises AgentError, and closes the channel, when it is not up within UP_S.
    """
    end.setblocking(False)
    try:
        received = await within(UP_S, receive(end))
        if received is None or not isinstance(received[0], channel.ProcessIdle):
            raise AgentError("a process ended before it could take an assignment; the agent's own output may say why")
        return IdleProcess(end, watch(received[0].pid), warm=warm)
    except TimeoutError:
        end.close()
        raise AgentError(f"a process was not up within {UP_S:.0f} s; the node is overloaded") from None
    except BaseException:
        end.close()
        raise


def _idle_process_exited(status: int) -> None:
    """Do nothing: `IdleProcess.assign` notices that the process has ended."""
