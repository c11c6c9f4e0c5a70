"""The agent's side of the fork server: starts it, tells it what to import and when to fork, and replaces it.

A fork server that ends is replaced. One that ends again and again before its imports are done is given up: processes
then start as new interpreters.

A watchdog kills a fork server or a store that is alive and does nothing. One that was stopped (SIGSTOP, a debugger) or
hangs would keep its place: a fork server that forks nothing, a store that answers no rank. Once killed, it is replaced.
"""

import asyncio
import contextlib
import enum
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from ..platforms.processes import ChildReaper, WatchedProcess
from ..protocol.compat import within
from ..protocol.errors import AgentError
from ..protocol.own_programs import own_program
from . import channel
from .linux import is_stopped

FIRST_IMPORTS_S = 120.0  # torch and all, on a machine that does other things too
IMPORTS_ANSWER_S = 600.0  # while it imports it answers nothing, and file systems can be slow
MAX_EARLY_EXITS = 3  # fork servers in a row that ended before their imports were done
_log = logging.getLogger(__name__)
CHECK_S = 1.0
ANSWER_S = 10.0  # a busy machine takes its time


class _Phase(enum.Enum):
    FIRST_IMPORTS = "first imports"  # worth waiting for: a cold process would import the same
    UP = "up"
    IMPORTING_AGAIN = "importing again"
    NONE = "none"  # given up, or not wanted


class ForkServerHost:
    """Keeps one fork server of a node. Belongs to the running loop.

    `on_up` is called when a server has imported its modules, `on_stop` when one is ended on purpose: what was
    forked from it is then out of date.
    """

    def __init__(self, reaper: ChildReaper, *, on_up: Callable[[], None], on_stop: Callable[[], None]) -> None:
        self._reaper = reaper
        self._on_up = on_up
        self._on_stop = on_stop
        self._environment: dict[str, str] = {}
        self._preload: channel.Preload | None = None
        self._phase = _Phase.NONE
        self._imported = asyncio.Event()  # the first imports are done, or will not be
        self._process: WatchedProcess | None = None
        self._end: socket.socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._watchdog: Watchdog | None = None
        self._importing = 0  # requests to import that the server has not answered
        self._early_exits = 0
        self._began_s = 0.0
        self.imports_s = 0.0  # from the start of the server until its imports were done

    @property
    def pid(self) -> int | None:
        """The process of the server, if there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def is_up(self) -> bool:
        """True when a server has done its imports, so that a fork is at once a warm process."""
        return self._phase is _Phase.UP

    def start(self, environment: Mapping[str, str], preload: channel.Preload | None = None) -> None:
        """Start a server with this environment; it imports its own modules and those of `preload`."""
        self._environment, self._preload = dict(environment), preload
        self._start(_Phase.FIRST_IMPORTS)

    def preload(self, preload: channel.Preload | None) -> None:
        """Have the running server, and every later one, import these modules too."""
        self._preload = preload
        self._send_preload()

    def stop(self) -> None:
        """End the server, if there is one. Idempotent."""
        self._on_stop()
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
        self._close_channel()
        self._enter(_Phase.NONE)

    async def first_imports(self) -> None:
        """Wait while the first server imports, for FIRST_IMPORTS_S at most. For a later one: return at once."""
        if self._phase is _Phase.FIRST_IMPORTS:
            with contextlib.suppress(TimeoutError):
                await within(FIRST_IMPORTS_S, self._imported.wait())

    def can_fork(self) -> bool:
        """Say whether a fork can be asked for. One that does its first imports forks between them."""
        return self._phase in {_Phase.FIRST_IMPORTS, _Phase.UP}

    def fork(self, end: socket.socket, *, backends: bool) -> None:
        """Ask for an idle process at this end of a channel. Raises AgentError when there is no server."""
        self._send(channel.ForkProcess(backends), (end.fileno(),))

    def _start(self, phase: _Phase) -> None:
        try:
            pid, end = _inherited(self._environment) or spawn("fork_server", self._environment)
        except AgentError as error:
            _log.error("no fork server, so each process starts as a new interpreter and imports torch: %s", error)
            self._enter(_Phase.NONE)
            return
        end.setblocking(False)
        self._enter(phase)
        self._began_s = time.monotonic()
        self._end = end
        self._process = self._reaper.watch(pid, self._exited)
        self._importing = 1
        self._watchdog = Watchdog(
            "the fork server", self._process, lambda: self._send(channel.Ping()), answer_s=IMPORTS_ANSWER_S
        )
        self._listener = asyncio.get_running_loop().create_task(self._listen(end))
        self._send_preload()

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        if phase is _Phase.FIRST_IMPORTS:
            self._imported.clear()
        else:
            self._imported.set()

    def _exited(self, status: int) -> None:
        if self._process is None or self._process.alive:
            return  # stopped on purpose
        self._early_exits = 0 if self._phase is _Phase.UP else self._early_exits + 1
        self._process = None
        self._close_channel()
        if self._early_exits >= MAX_EARLY_EXITS:
            _log.error(
                "the fork server ended with status %d, %d times in a row before its imports were done: from now on "
                "processes start as new interpreters, seconds slower. The lines above may say why",
                status,
                self._early_exits,
            )
            self._enter(_Phase.NONE)
            return
        _log.warning("the fork server ended with status %d; starting another", status)
        self._start(_Phase.IMPORTING_AGAIN)

    def _close_channel(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
        if self._end is not None:
            self._end.close()
            self._end = None

    async def _listen(self, end: socket.socket) -> None:
        while True:
            try:
                received = await receive(end)
            except (AgentError, OSError, ValueError) as error:
                _log.warning("the fork server's channel cannot be read: %s", error)
                return
            if received is None or end is not self._end:
                return
            message, _ = received
            self._importing -= isinstance(message, channel.ModulesImported)
            if self._watchdog is not None:
                self._watchdog.answered()
                self._watchdog.answer_s = IMPORTS_ANSWER_S if self._importing else ANSWER_S
            if isinstance(message, channel.ModulesImported):
                self._modules_imported(message)

    def _modules_imported(self, message: channel.ModulesImported) -> None:
        for failed in message.failed:
            _log.info("the fork server cannot import %s", failed)
        if message.threads:
            self._give_up_unsafe(", ".join(message.threads))
            return
        self._enter(_Phase.UP)
        self.imports_s = time.monotonic() - self._began_s
        self._early_exits = 0
        self._on_up()

    def _give_up_unsafe(self, threads: str) -> None:
        """End a server that has other threads, by their names: its forks could deadlock. Start one without preload."""
        preload, self._preload = self._preload, None
        self.stop()
        if preload is None:
            _log.error("an import has started a thread (%s), so no fork server is used: processes start cold", threads)
            return
        _log.error(
            "one of the modules of standby.preload (%s) has started a thread (%s), and a fork with threads is not "
            "safe: remove it from the policy. The fork server is started again without these modules",
            ", ".join(preload.modules),
            threads,
        )
        self._start(_Phase.FIRST_IMPORTS)

    def _send_preload(self) -> None:
        if self._preload is not None:
            try:
                self._send(self._preload)
                self._importing += 1
                if self._watchdog is not None:
                    self._watchdog.answer_s = IMPORTS_ANSWER_S
            except AgentError as error:
                _log.warning("the modules of standby.preload are not imported ahead of the fork: %s", error)

    def _send(self, message: channel.ChannelMessage, fds: tuple[int, ...] = ()) -> None:
        if self._end is None:
            raise AgentError("there is no fork server")
        channel.send(self._end, message, fds)


class Watchdog:
    """Watches one process until it exits. `ping` asks it for an answer, which its owner reports by `answered`."""

    def __init__(
        self,
        name: str,
        process: WatchedProcess,
        ping: Callable[[], None],
        *,
        answer_s: float = ANSWER_S,
        check_s: float = CHECK_S,
    ) -> None:
        """Start watching, in the running loop. `answer_s`: how long an answer may take; its owner may change it."""
        self.answer_s = answer_s
        self._name = name
        self._process = process
        self._ping = ping
        self._check_s = check_s
        self._asked = False
        self._unanswered_s = 0.0
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def answered(self) -> None:
        """Take note of an answer."""
        self._asked, self._unanswered_s = False, 0.0

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._task.cancel()

    async def _watch(self) -> None:
        while self._process.alive:
            await asyncio.sleep(self._check_s)
            failure = self._failure()
            if failure is not None and self._process.alive:
                _log.error("%s, process %d, %s; it is killed and replaced", self._name, self._process.pid, failure)
                self._process.kill()
                return

    def _failure(self) -> str | None:
        if is_stopped(self._process.pid):
            return "is stopped"
        # Counted in checks and not by the clock: an agent that did not run itself first reads what came meanwhile.
        self._unanswered_s += self._check_s if self._asked else 0.0
        if self._unanswered_s > self.answer_s:
            return f"has not answered for {self.answer_s:g} s"
        if not self._asked:
            self._asked = True
            with contextlib.suppress(AgentError):  # its queue is full, or it has exited: both are seen elsewhere
                self._ping()
        return None


async def receive(end: socket.socket) -> channel.MessageWithFds | None:
    """Wait for the next message on a channel. Returns None when the other end is closed."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return channel.receive(end)
        except BlockingIOError:
            readable = loop.create_future()
            number = end.fileno()
            loop.add_reader(number, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(number)


_at_hand: tuple[int, socket.socket] | None = None


def start_with(pid: int, end: socket.socket) -> None:
    """Have the first fork server of this process be one that is there already, with this process's environment."""
    global _at_hand  # noqa: PLW0603 - a process has one
    _at_hand = pid, end


def _inherited(environment: Mapping[str, str]) -> tuple[int, socket.socket] | None:
    """Return the fork server that is there already. One of another environment is ended instead."""
    global _at_hand
    found, _at_hand = _at_hand, None
    if found is not None and environment != os.environ:
        found[1].close()  # it ends by that, and this process reaps it
        found = None
    return found


def spawn(module: str, environment: Mapping[str, str]) -> tuple[int, socket.socket]:
    """Start `midstep.agent.<module> AGENT_PID` as a program, with one end of a channel.

    Returns its pid and the other end. Raises AgentError.
    """
    end, theirs = channel.pair()
    command = [*own_program(f"{__package__}.{module}"), str(os.getpid())]
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, theirs.fileno(), channel.CHANNEL_FD),
    ]
    try:
        pid = os.posix_spawn(command[0], command, environment, file_actions=files)
    except OSError as error:
        end.close()
        raise AgentError(f"{' '.join(command)} cannot be started: {error}") from error
    finally:
        theirs.close()
    return pid, end


def _set(readable: "asyncio.Future[None]") -> None:
    if not readable.done():
        readable.set_result(None)
