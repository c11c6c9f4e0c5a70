"""How long a node has been without a rank: a machine that is not needed is given back after a time.

Only for nodes that have joined by themselves: those that a platform makes are ended by it.
"""

import asyncio
from collections.abc import Callable

LOOK_S = 0.5


class SpareTime:
    """Watches one node in the running loop. `on_over` is called once, when no rank was there for `limit_s`."""

    def __init__(self, hosts_ranks: Callable[[], bool], on_over: Callable[[], None]) -> None:
        """Set no limit yet."""
        self.limit_s: float | None = None
        self._hosts_ranks = hosts_ranks
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._spare_since_s = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._hosts_ranks():
            self._spare_since_s = now
        elif self.limit_s is not None and now - self._spare_since_s > self.limit_s:
            self._on_over()
            return
        self._timer = self._loop.call_later(LOOK_S, self._look)
