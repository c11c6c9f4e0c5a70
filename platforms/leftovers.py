"""Leftover processes of a node: kill everything below its agent, or everything that carries the node's mark.

A process can leave its parents, its session and its environment behind: a daemon that forks twice, calls `setsid` and
starts a program without variables has no parent on the node any more when the agent has been killed. So a node has two
marks that its processes inherit. One is an environment variable, which is easy to look up. The other is the soft limit
of file locks (RLIMIT_LOCKS): Linux has not enforced it since 2.4.25, but keeps it across fork and exec, and shows it in
/proc/PID/limits.
"""

import contextlib
import logging
import os
import resource
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import xxhash

from ..protocol import environment as names

KILL_S = 2.0  # for all marked processes to exit; what takes longer hangs in the kernel
PAUSE_S = 0.01
_RLIMIT_LOCKS = 10  # `resource` has no name for it
_LOCKS_LINE = "Max file locks"
_LEAST_LIMIT = 1 << 62  # above any limit that is set for a reason

_log = logging.getLogger(__name__)


class NodeMark:
    """The mark of one node: set when its agent is started, and inherited by every process below it."""

    def __init__(self, run_directory: Path, node: str) -> None:
        """`run_directory`: the job's, on this machine."""
        self.socket = f"ipc://{run_directory.resolve() / node}/agent.sock"
        self._limit = _LEAST_LIMIT | (xxhash.xxh3_64_intdigest(self.socket.encode()) >> 3)
        self._variable = f"{names.AGENT_SOCKET}={self.socket}".encode()

    @contextlib.contextmanager
    def inherited(self) -> Iterator[dict[str, str]]:
        """Mark the processes that are started within. Yields the variables to start them with.

        Where the limit may not be set, the variable is the only mark.
        """
        variables = {names.AGENT_SOCKET: self.socket}
        before = resource.getrlimit(_RLIMIT_LOCKS)
        try:
            resource.setrlimit(_RLIMIT_LOCKS, (self._limit, before[1]))
        except (ValueError, OSError) as error:
            _log.warning(
                "processes that clear their environment may outlive %s: cannot set RLIMIT_LOCKS: %s", self.socket, error
            )
            yield variables
            return
        try:
            yield variables
        finally:
            resource.setrlimit(_RLIMIT_LOCKS, before)

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
        return _limit_of(pid) == self._limit or self._variable in _environment_of(pid)

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
