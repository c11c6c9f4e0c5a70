"""A process that serves something for a node as long as the job runs, and is started again when it exits.

The rendezvous store is one, and the scheduler of MindSpore. One that fails at its start again and again must not keep a
core busy, so there is a limit.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ..platforms.processes import WatchedProcess
from ..protocol.errors import AgentError

EARLY_EXIT_S = 5.0  # a process that has served for longer did not fail at its start
RETRY_S = 0.5  # times the early exits in a row, less one
MAX_EARLY_EXITS = 5  # in a row; then something is wrong with the node
_log = logging.getLogger(__name__)


class KeptProcess:
    """One such process. `begin` starts it, and has `exited` called; it raises AgentError. `what`: its name in words.

    `on_failed` is called when it is given up, with the reason, of which `check` is the end. `done`: the exit status of
    one that has nothing left to do.
    """

    def __init__(
        self,
        what: str,
        begin: Callable[[], Awaitable[WatchedProcess]],
        *,
        on_failed: Callable[[str], None],
        check: str,
        done: int | None = None,
    ) -> None:
        self._what = what
        self._begin = begin
        self._on_failed = on_failed
        self._check = check
        self._done = done
        self._process: WatchedProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._early_exits = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The pid of the process; None while there is none."""
        return self._process.pid if self._process is not None and self._process.alive else None

    def start(self) -> None:
        """Begin to start the process."""
        self._starting = asyncio.get_running_loop().create_task(self._start())

    def kill(self) -> None:
        """Kill the process, which is started again."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        self.kill()

    def exited(self, status: int) -> None:
        """Start the process again, which has exited."""
        if self._closed:
            return
        if time.monotonic() - self._started_s > EARLY_EXIT_S:
            self._early_exits = 0
        if status == self._done:
            _log.info("%s has ended: nothing needs it any more", self._what)
        else:
            self._restart(f"ended with status {status}")

    async def _start(self) -> None:
        try:
            await asyncio.sleep(RETRY_S * max(0, self._early_exits - 1))
            self._process = await self._begin()
        except AgentError as error:
            self._restart(f"cannot be started: {error}")
            return
        self._started_s = time.monotonic()

    def _restart(self, how: str) -> None:
        if self._closed:
            return
        self._early_exits += 1
        if self._early_exits >= MAX_EARLY_EXITS:
            self._on_failed(f"{self._what} {how}, {MAX_EARLY_EXITS} times in a row. {self._check}")
            return
        _log.warning("%s %s; starting it again at the same port", self._what, how)
        self.start()
