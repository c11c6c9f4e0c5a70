"""Notices the end of a child process at once, by waiting for it, and never signals a process of another name.

Used wherever midstep has children: an agent its ranks, zygote and store; the local platform its agents.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

_CODES_OF_SIGNALS = frozenset({os.CLD_KILLED, os.CLD_DUMPED})


class WatchedProcess:
    """A child of this process. `on_exit(status)` is called once: its exit status, or minus its signal's
    number.

    What is left of its process group, if it leads one, is killed when it ends.
    """

    def __init__(self, pid: int, on_exit: Callable[[int], None]) -> None:
        self.pid = pid
        self.status: int | None = None
        self.on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._exited = asyncio.Event()
        self._loop.add_reader(self._pidfd, self._ended)

    @property
    def alive(self) -> bool:
        """Whether the process has not been seen to end."""
        return self.status is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; to one that has ended: nothing."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill the process and its group."""
        if self._pidfd >= 0:
            self._kill_group()
            self.signal(signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended and `on_exit` was called; False: it has not within `timeout_s`."""
        try:
            await asyncio.wait_for(self._exited.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _ended(self) -> None:
        # The leader has not been waited for yet, so the number of the group cannot be anybody else's.
        self._kill_group()
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            status = -int(signal.SIGKILL)  # somebody else has waited for it: how it ended is lost
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
