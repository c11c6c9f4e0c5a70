"""Virtual time: what will happen, in order. Nothing here waits, so an hour of a job takes milliseconds."""

import heapq
from collections.abc import Callable


class Timeline:
    """A heap of things to happen. Equal times keep the order in which they were asked for."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.now = start_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have `call` happen `delay_s` from now. What must not happen any more has to say so itself."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), self._count, call))

    def step(self) -> bool:
        """Let the next thing happen; False when there is none."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        call()
        return True
