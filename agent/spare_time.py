"""How long a node has been without a rank: a machine that is not needed is given back after a time.

The time is only for nodes that have joined by themselves: a platform ends those that it makes. A machine that is about
to be taken away is given back as soon as its ranks have moved.
"""

import asyncio
from collections.abc import Callable

LOOK_S = 0.5
SOON_S = 1.0  # a rank whose process is started again is away for less


class SpareTime:
    """Watches one node in the running loop. `on_over` is called once, when no rank was there for `limit_s`."""

    def __init__(self, hosts_ranks: Callable[[], bool], on_over: Callable[[], None]) -> None:
        """Set no limit yet."""
        self.limit_s: float | None = None
        self.ends_soon = False  # the machine is to go: SOON_S are enough
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
        limit_s = SOON_S if self.ends_soon else self.limit_s
        if self._hosts_ranks():
            self._spare_since_s = now
        elif limit_s is not None and now - self._spare_since_s > limit_s:
            self._on_over()
            return
        self._timer = self._loop.call_later(LOOK_S, self._look)
