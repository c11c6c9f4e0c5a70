"""Processes of this machine: watch children, reap orphans, kill what a node has left behind, and open log files.

Used by an agent for its ranks, fork server and store, and by the local platform for its agents.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import xxhash

from ..protocol import environment as names
from ..protocol.compat import within
from ..protocol.private_files import make_private_directory, open_for_appending

_CODES_OF_SIGNALS = frozenset({os.CLD_KILLED, os.CLD_DUMPED})
KILL_S = 2.0  # for all marked processes to exit; what takes longer hangs in the kernel
PAUSE_S = 0.01
RLIMIT_LOCKS = 10  # `resource` has no name for it
_LOCKS_LINE = "Max file locks"
_LEAST_LIMIT = 1 << 62  # above any limit that is set for a reason
STDERR = 2

_log = logging.getLogger(__name__)


class WatchedProcess:
    """A child of this process, watched through its pidfd: a signal never hits another process with the same pid.

    `on_exit(status)` is called once, with the exit status or minus the signal's number. When a process that leads a
    process group exits, the rest of the group is killed.
    """

    def __init__(self, pid: int, on_exit: Callable[[int], None], pidfd: int | None = None) -> None:
        """Watch it, in the running loop. `pidfd`: where it is there already; this object closes it."""
        self.pid = pid
        self.status: int | None = None
        self.on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid) if pidfd is None else pidfd
        self._exited = asyncio.Event()
        self._loop.add_reader(self._pidfd, self._on_readable)

    @property
    def alive(self) -> bool:
        """True until the exit of the process has been seen."""
        return self.status is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process. Does nothing if it has exited."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill the process and its group."""
        if self._pidfd >= 0:
            self._kill_group()
            self.signal(signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the process has exited and `on_exit` was called. Returns False after `timeout_s`."""
        try:
            await within(timeout_s, self._exited.wait())
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_readable(self) -> None:
        # The leader has not been reaped yet, so the id of the group is not in use again.
        self._kill_group()
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            status = -int(signal.SIGKILL)  # reaped elsewhere, so its status is lost
        else:
            if result is None:
                return
            status = -result.si_status if result.si_code in _CODES_OF_SIGNALS else result.si_status
        self._ended(status)

    def _ended(self, status: int) -> None:
        self.close()
        self.status = status
        self._exited.set()
        self.on_exit(status)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self.pid) == self.pid:  # too young to have its own: then it has no others either
                os.killpg(self.pid, signal.SIGKILL)


class ChildReaper:
    """Reaps every child of this process that no WatchedProcess waits for, so that no zombie stays.

    An agent becomes the parent of all processes below it whose own parent has exited: of forked idle processes, and of
    what a killed rank had started. While a child is expected and its pid is not known yet, no unknown child is reaped.
    Belongs to the running loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, WatchedProcess] = {}
        self._expected = 0
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> WatchedProcess:
        """Watch a child. `on_exit(status)` can be replaced later through the returned object."""

        def exited(status: int) -> None:
            del self._watched[pid]
            self._loop.call_soon(self._reap)  # others may have exited behind it
            process.on_exit(status)

        process = WatchedProcess(pid, exited)
        process.on_exit, self._watched[pid] = on_exit, process
        return process

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Reap no unknown child within: a child is coming and its pid is not known yet."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1
            self._loop.call_soon(self._reap)

    def close(self) -> None:
        """Stop watching and reaping. Idempotent."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for process in self._watched.values():
            process.close()
        self._watched.clear()

    def _reap(self) -> None:
        while not self._expected:
            try:
                exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if exited is None or exited.si_pid in self._watched:
                return  # its watcher is about to reap it, and then asks for those behind it
            os.waitpid(exited.si_pid, os.WNOHANG)


class NodeMark:
    """The mark of one node, set when its agent is started, by which every process below it can be found and killed.

    A process can leave its parents, its session and its environment behind: a daemon that forks twice, calls `setsid`
    and starts a program without variables has no parent on the node any more when the agent has been killed. So a node
    has two marks that its processes inherit. One is an environment variable, which is easy to look up. The other is the
    soft limit of file locks (RLIMIT_LOCKS): Linux has not enforced it since 2.4.25, but keeps it across fork and exec,
    and shows it in /proc/PID/limits.
    """

    def __init__(self, run_directory: Path, node: str) -> None:
        """`run_directory`: the job's, on this machine."""
        self.socket = f"ipc://{run_directory.resolve() / node}/agent.sock"
        self.limit = _LEAST_LIMIT | (xxhash.xxh3_64_intdigest(self.socket.encode()) >> 3)
        self.variables = {names.AGENT_SOCKET: self.socket}
        self._variable = f"{names.AGENT_SOCKET}={self.socket}".encode()

    @contextlib.contextmanager
    def inherited(self) -> Iterator[dict[str, str]]:
        """Mark the processes that are started within. Yields the variables to start them with.

        Where the limit may not be set, the variable is the only mark.
        """
        before = resource.getrlimit(RLIMIT_LOCKS)
        try:
            resource.setrlimit(RLIMIT_LOCKS, (self.limit, before[1]))
        except (ValueError, OSError) as error:
            _log.warning(
                "processes that clear their environment may outlive %s: cannot set RLIMIT_LOCKS: %s", self.socket, error
            )
            yield self.variables
            return
        try:
            yield self.variables
        finally:
            resource.setrlimit(RLIMIT_LOCKS, before)

    def kill_all(self) -> None:
        """Kill every process with this mark, and what they start meanwhile, within KILL_S."""
        deadline = time.monotonic() + KILL_S
        while found := self._sweep(deadline):
            if time.monotonic() > deadline:
                _log.error("processes of %s that do not exit after SIGKILL: %s", self.socket, found)
                return
            time.sleep(PAUSE_S)

    def marks(self, pid: int) -> bool:
        """Return whether the process carries the mark. False when it has exited."""
        return _limit_of(pid) == self.limit or self._variable in _environment_of(pid)

    def _sweep(self, deadline: float) -> list[int]:
        """Kill what is marked, and return the pids. Processes that were forked during the sweep are checked, too."""
        found: list[int] = []
        seen: set[int] = set()
        while (fresh := {*psutil.pids()} - seen) and time.monotonic() <= deadline:
            found += [pid for pid in fresh if self._kill(pid)]
            seen |= fresh
        return found

    def _kill(self, pid: int) -> bool:
        """Kill the process if it is marked. Returns whether it was sent SIGKILL."""
        if pid == os.getpid():
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            process = os.pidfd_open(pid)
            try:
                # Checked after it was opened, so what is killed is never another process that got the pid since.
                if not _has_exited(process) and self.marks(pid):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    return True
            finally:
                os.close(process)
        return False


def can_limit_locks() -> bool:
    """Return whether the limit that marks a node may be set by this process, and by forks of one that it starts."""
    return resource.getrlimit(RLIMIT_LOCKS)[1] == resource.RLIM_INFINITY


def kill_tree(pid: int) -> None:
    """Kill a process and everything below it, the root first, so that it starts nothing more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        below = root.children(recursive=True)
        root.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _has_exited(process: int) -> bool:
    """Return whether the process behind a pidfd has exited; it may stay a zombie until its parent reaps it."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _limit_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
            if line.startswith(_LOCKS_LINE):
                return int(line.removeprefix(_LOCKS_LINE).split()[0])
    return None


def _environment_of(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def open_log(path: Path) -> int:
    """Return a descriptor, the caller's to close, that appends to `path`, or else to this process's stderr.

    A log never keeps a process from starting: a directory that is full, read-only or removed costs lines only.
    Raises OSError when this process has no descriptor left.
    """
    try:
        make_private_directory(path.parent)
        return open_for_appending(path)
    except OSError as error:
        _log.warning("cannot write %s: %s; its lines are written here instead", path, error.strerror or error)
    sys.stderr.flush()
    try:
        return os.dup(STDERR)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
