"""Looks after a connection to controllers on other machines: makes it again, and says when to leave.

libzmq connects again by itself, but not where a key was refused, nor at another controller's endpoint. While
there is no controller the training continues; only after `leave_s` a node gives the job up.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from .controller_addresses import each_address
from .errors import ConfigurationError
from .link import ControllerLink
from .time_limit import within

LOOK_S = 0.25
CONNECT_AGAIN_S = 3.0  # at the only endpoint
NEXT_S = 0.75  # at the next one of several: on a slow link a handshake takes half of that
RESOLVE_S = 5.0  # for a name server to say which addresses there are

_log = logging.getLogger(__name__)


class Absence:
    """Watches one link in the running loop. `on_leave` is called once, when no controller was there for `leave_s`."""

    def __init__(
        self, link: ControllerLink, endpoints: Sequence[str], on_leave: Callable[[], None] = lambda: None
    ) -> None:
        """`endpoints`: where controllers may listen; all their addresses are tried in turn, the present one last."""
        self.leave_s = float("inf")
        self._link = link
        self._endpoints = tuple(endpoints)
        self._next: list[str] = []  # addresses that are to be tried in this turn
        self._again_s = NEXT_S
        self._resolving: asyncio.Task[None] | None = None
        self._on_leave = on_leave
        self._loop = asyncio.get_running_loop()
        self._here_s = self._tried_s = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()
        if self._resolving is not None:
            self._resolving.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        now = self._loop.time()
        if self._link.connected:
            self._here_s = self._tried_s = now
            self._next.clear()
        elif now - self._here_s > self.leave_s:
            self._timer.cancel()
            self._on_leave()
        elif not self._next:
            if self._resolving is None:
                self._resolving = self._loop.create_task(self._resolve())
        elif now - self._tried_s >= self._again_s:
            self._tried_s = now
            try:
                self._link.connect_to(self._next.pop(0))
            except ConfigurationError as error:
                _log.warning("%s", error)

    async def _resolve(self) -> None:
        """Begin a turn: look up where controllers may be by now."""
        try:
            found = self._endpoints
            with contextlib.suppress(TimeoutError):
                found = await within(RESOLVE_S, asyncio.to_thread(each_address, self._endpoints))
            others = [each for each in found if each != self._link.endpoint]
            self._next = [*others, *(each for each in found if each == self._link.endpoint)]
            self._again_s = NEXT_S if others else CONNECT_AGAIN_S
        finally:
            self._resolving = None
