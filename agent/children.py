"""Every process that ends on a node is waited for: by its owner if it has one, else here, so that no zombie
stays.

The agent is the parent of all processes below it whose own parent has ended: forked standbys, and the workers
of a rank that was killed. A process is watched from the moment its pid is known; until then nothing unknown
is waited for.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from ..platforms.processes import WatchedProcess


class Children:
    """The children of the agent. Belongs to the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, WatchedProcess] = {}
        self._expected = 0
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> WatchedProcess:
        """Watch a child; `on_exit(status)` can be replaced later through the answer."""

        def ended(status: int) -> None:
            del self._watched[pid]
            self._loop.call_soon(self._reap)  # it may have hidden others
            process.on_exit(status)

        process = WatchedProcess(pid, ended)
        process.on_exit, self._watched[pid] = on_exit, process
        return process

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """A child is coming whose pid is not known yet: within, nothing unknown is waited for."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1
            self._loop.call_soon(self._reap)

    def close(self) -> None:
        """Stop watching and waiting. Idempotent."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for process in self._watched.values():
            process.close()
        self._watched.clear()

    def _reap(self) -> None:
        while not self._expected:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in self._watched:
                return  # its watcher is about to wait for it, and then asks for those behind it
            os.waitpid(ended.si_pid, os.WNOHANG)
