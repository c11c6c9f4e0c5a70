"""Child processes: watch for their exit, signal them safely, and reap those without an owner.

Used by an agent for its ranks, fork server and store, and by the local platform for its agents.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from ..protocol.time_limit import within

_CODES_OF_SIGNALS = frozenset({os.CLD_KILLED, os.CLD_DUMPED})


class WatchedProcess:
    """A child of this process, watched through its pidfd: a signal never hits another process with the same pid.

    `on_exit(status)` is called once, with the exit status or minus the signal's number. When a process that leads a
    process group exits, the rest of the group is killed.
    """

    def __init__(self, pid: int, on_exit: Callable[[int], None]) -> None:
        self.pid = pid
        self.status: int | None = None
        self.on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._exited = asyncio.Event()
        self._loop.add_reader(self._pidfd, self._on_readable)

    @property
    def alive(self) -> bool:
        """Whether no exit of the process has been seen."""
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
