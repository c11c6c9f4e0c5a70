"""Looks after a connection to controllers on other machines: makes it again, and says when to leave.

libzmq connects again by itself, but not where a key was refused, nor at another controller's endpoint. While
there is no controller the training continues; only after `leave_s` a node gives the job up.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import cycle

from .errors import ConfigurationError
from .link import ControllerLink

LOOK_S = 0.25
CONNECT_AGAIN_S = 3.0  # at the only endpoint
NEXT_S = 0.75  # at the next one of several: on a slow link a handshake takes half of that

_log = logging.getLogger(__name__)


class Absence:
    """Watches one link in the running loop. `on_leave` is called once, when no controller was there for `leave_s`."""

    def __init__(
        self, link: ControllerLink, endpoints: Sequence[str], on_leave: Callable[[], None] = lambda: None
    ) -> None:
        """`endpoints`: where controllers may listen; they are tried in turn, the present one last."""
        self.leave_s = float("inf")
        self._link = link
        others = [each for each in endpoints if each != link.endpoint]
        self._endpoints = cycle([*others, link.endpoint])
        self._again_s = NEXT_S if others else CONNECT_AGAIN_S
        self._on_leave = on_leave
        self._loop = asyncio.get_running_loop()
        self._here_s = self._tried_s = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        now = self._loop.time()
        if self._link.connected:
            self._here_s = self._tried_s = now
        elif now - self._here_s > self.leave_s:
            self._timer.cancel()
            self._on_leave()
        elif now - self._tried_s >= self._again_s:
            self._tried_s = now
            try:
                self._link.connect_to(next(self._endpoints))
            except ConfigurationError as error:
                _log.warning("%s", error)
