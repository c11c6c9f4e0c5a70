"""Watchdog of an agent's fork server and store: kills a process that is alive and does nothing.

The exit of a process is seen at once; that it hangs is not. One that was stopped (SIGSTOP, a debugger) or hangs would
keep its place: a fork server that forks nothing, a store that answers no rank. Once killed, it is replaced as any other
that has exited.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ..platforms.processes import WatchedProcess
from ..protocol.errors import AgentError
from .linux import is_stopped

CHECK_S = 1.0
ANSWER_S = 10.0  # a busy machine takes its time

_log = logging.getLogger(__name__)


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
