"""The controller's time."""

import asyncio
import time


class Clock:
    """Wall-clock seconds that never run backwards, not even behind those of an earlier controller of the job."""

    def __init__(self, floor_s: float = 0.0) -> None:
        self._base_s = max(time.time(), floor_s) - time.monotonic()

    def now(self) -> float:
        """Return the time, in seconds since 1970."""
        return self._base_s + time.monotonic()


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, or until `timeout_s` is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
