"""The agents of several nodes on one machine, forked from one process that has imported what all of them need.

Each node's fork server imports torch and what a first optimizer needs: five seconds of a core, most of what a small job
costs when it begins. Where a machine has several nodes, one process imports, every agent is a fork of it, and each
agent's fork server a fork of the agent, so a node is a tree of processes of its own as elsewhere.

That process is the parent of the agents, and tells how they have ended. It decides nothing: without it agents live on,
and are started as new interpreters.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ..protocol.own_programs import own_program
from .processes import WatchedProcess, open_log

PROGRAM = "midstep.agent.agent_forker"
LOG = "agents.log"
IMPORTS_S = 120.0  # torch and all, on a machine that does other things too
FORK_S = 10.0
PAUSE_S = 0.01
TOLD_S = 1.0  # from the end of a process until its parent has said how it ended
MOST_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class ForkAgent(msgspec.Struct, frozen=True, tag=True):
    """Ask for the agent of a node. Descriptors: its log, and the pipe that ends with its launcher.

    `arguments`: of `midstep agent`. `variables`: beside the environment of all nodes. `lock_limit`: marks what runs on
    the node (RLIMIT_LOCKS, see NodeMark).
    """

    node: str
    arguments: tuple[str, ...]
    variables: dict[str, str]
    lock_limit: int


class Imported(msgspec.Struct, frozen=True, tag=True):
    """The process has imported its modules, and forks from now on."""


class AgentForked(msgspec.Struct, frozen=True, tag=True):
    """The agent of a node runs. Descriptor: its pidfd, which is good even if it has exited since."""

    node: str
    pid: int


class AgentEnded(msgspec.Struct, frozen=True, tag=True):
    """An agent has exited: with a status, or minus the number of a signal."""

    pid: int
    status: int


Answer = Imported | AgentForked | AgentEnded
_encoder = msgspec.msgpack.Encoder()
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_orders = msgspec.msgpack.Decoder(ForkAgent)


def send(end: socket.socket, message: ForkAgent | Answer, fds: tuple[int, ...] = ()) -> None:
    """Send a message. Raises OSError."""
    socket.send_fds(end, [_encoder.encode(message)], fds, socket.MSG_NOSIGNAL)


def receive_order(end: socket.socket) -> tuple[ForkAgent, list[int]] | None:
    """Receive an order and its descriptors, in the process that forks. None: the launcher has ended."""
    data, fds, _, _ = socket.recv_fds(end, MOST_BYTES, 2)
    return (_orders.decode(data), fds) if data else None


class ForkedProcess(WatchedProcess):
    """A process that is the child of another process, which tells its exit status."""

    told: int | None = None
    _gone = False

    def tell(self, status: int) -> None:
        """Take note of how it has ended."""
        self.told = status
        if self._gone:
            self._end_with(status)

    def _on_readable(self) -> None:
        # Its parent may have reaped it, so its number may be another process's by now.
        self._loop.remove_reader(self._pidfd)
        self._gone = True
        if self.told is not None:
            self._end_with(self.told)
        else:
            self._loop.call_later(TOLD_S, self._end_with, -int(signal.SIGKILL))  # its parent has ended, too

    def _end_with(self, status: int) -> None:
        if self.status is None:
            self._ended(status)


class AgentForker:
    """Starts the process, asks it for agents, and hands on how they end. Belongs to the running loop.

    `on_forked(node, pid, pidfd)` is called for each agent that was asked for, unless `on_gone()` is called first: the
    process has ended, or does not answer, and forks nothing any more.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        log_directory: Path,
        *,
        on_forked: Callable[[str, int, int], None],
        on_gone: Callable[[], None],
    ) -> None:
        """Start it. Raises OSError."""
        self._on_forked = on_forked
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._waiting: set[str] = set()
        self._imported = False
        self._agents: dict[int, ForkedProcess] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.setblocking(False)
        with theirs, open(open_log(log_directory / LOG), "ab", buffering=0) as output:
            process = subprocess.Popen(
                [*own_program(PROGRAM), str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
            )
        process.returncode = 0  # WatchedProcess reaps it; Popen must not do so too
        self._process = WatchedProcess(process.pid, lambda _: self._give_up())
        self._loop.add_reader(self._end.fileno(), self._read)

    @property
    def pid(self) -> int:
        """The process that forks."""
        return self._process.pid

    def fork(self, order: ForkAgent, log: int, life: int) -> bool:
        """Ask for an agent; return whether it can be asked for."""
        if self._end.fileno() < 0:
            return False
        try:
            send(self._end, order, (log, life))
        except OSError as error:
            _log.warning("no fork for %s: %s", order.node, error)
            return False
        self._waiting.add(order.node)
        self._set_limit()
        return True

    def watch(self, pid: int, pidfd: int, on_exit: Callable[[int], None]) -> ForkedProcess:
        """Watch an agent that was forked. `on_exit` gets its status, as of a child."""
        agent = self._agents[pid] = ForkedProcess(pid, on_exit, pidfd)
        return agent

    async def settled(self) -> None:
        """Wait for what it has been asked for; what it would fork after its imports it never will."""
        deadline = self._loop.time() + FORK_S
        while self._imported and self._waiting and self._loop.time() < deadline:
            await asyncio.sleep(PAUSE_S)
        if self._waiting:
            self._give_up()

    async def ended(self, limit_s: float) -> None:
        """End the process, and wait for its end."""
        self.close()
        if not await self._process.wait(limit_s):
            _log.error("process %d, of which agents are forked, does not exit after SIGKILL", self._process.pid)

    def close(self) -> None:
        """End the process. What it has not forked yet it never will. Idempotent."""
        self._waiting.clear()
        self._set_limit()
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end.fileno())
            self._end.close()
        self._process.kill()

    def _read(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._end, MOST_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._give_up()
                return
            self._take(_answers.decode(data), *fds)

    def _take(self, answer: Answer, pidfd: int = -1) -> None:
        match answer:
            case Imported():
                self._imported = True
                self._set_limit()
            case AgentForked(node, pid):
                self._waiting.discard(node)
                self._set_limit()
                self._on_forked(node, pid, pidfd)
            case AgentEnded(pid, status):
                agent = self._agents.pop(pid, None)
                if agent is not None:
                    agent.tell(status)

    def _set_limit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._timer = self._loop.call_later(FORK_S if self._imported else IMPORTS_S, self._overdue)

    def _overdue(self) -> None:
        _log.error("process %d, of which agents are forked, does not answer; it is killed", self._process.pid)
        self._give_up()

    def _give_up(self) -> None:
        if self._end.fileno() >= 0:
            self.close()
            self._on_gone()
