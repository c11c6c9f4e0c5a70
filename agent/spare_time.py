"""When a node that has joined by itself leaves: it was asked to, or it was not needed for too long.

A node that is asked keeps its ranks while the controller moves them between two steps, and leaves when none is there.
If they find no other place in the time that it has, it leaves all the same. Platforms end the nodes that they make.
"""

import asyncio
import math
from collections.abc import Callable

LOOK_S = 0.5
SOON_S = 1.0  # a rank whose process is started again is away for less


class Departure:
    """Watches one node in the running loop, and calls `leave` once, with the reason."""

    def __init__(self, hosts_ranks: Callable[[], bool], leave: Callable[[str], None]) -> None:
        """Set no limit yet."""
        self.spare_s: float | None = None  # how long the node stays without a rank; None: for ever
        self._asked = ""  # by what the node was asked to leave
        self._allowed_s = math.inf
        self._asked_at_s = 0.0
        self._hosts_ranks = hosts_ranks
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._spare_since_s = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def ask(self, by: str, within_s: float = math.inf) -> None:
        """Leave as soon as the ranks have moved, and after `within_s` in any case."""
        self._asked, self._allowed_s, self._asked_at_s = by, within_s, self._loop.time()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        reason = self._reason(self._loop.time())
        if reason:
            self._leave(reason)
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _reason(self, now: float) -> str:
        if self._hosts_ranks():
            self._spare_since_s = now
        spare_for_s = now - self._spare_since_s
        if self._asked and spare_for_s > SOON_S:
            return f"it was asked to leave ({self._asked}), and has no rank any more"
        if self._asked and now - self._asked_at_s >= self._allowed_s:
            left = f"its ranks found no other place within {self._allowed_s:.0f} s"
            return f"it was asked to leave ({self._asked}), and {left}"
        if self.spare_s is not None and spare_for_s > self.spare_s:
            return f"it has waited as a spare for {self.spare_s:g} s (agent.spare_s)"
        return ""
