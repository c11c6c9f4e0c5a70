"""What the controller's loop waits for between two turns: descriptors that become readable, and a word from itself."""

import asyncio
import contextlib
from collections.abc import Sequence

from ..protocol.time_limit import within


class Waiting:
    """Watches descriptors in the running loop, inside a `with` block."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self._woken = asyncio.Event()

    def __enter__(self) -> "Waiting":
        loop = asyncio.get_running_loop()
        for descriptor in self._descriptors:
            loop.add_reader(descriptor, self._woken.set)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for descriptor in self._descriptors:
            loop.remove_reader(descriptor)

    def wake(self) -> None:
        """End the present wait, or else the next one, at once."""
        self._woken.set()

    def begin(self) -> None:
        """Forget what has happened so far: a turn that looks at everything begins."""
        self._woken.clear()

    async def wait(self, limit_s: float) -> None:
        """Wait until something has happened since `begin`, `limit_s` at most."""
        with contextlib.suppress(TimeoutError):
            await within(limit_s, self._woken.wait())

    async def rest(self, duration_s: float) -> None:
        """Wait, whatever happens. The descriptors are not looked at: one that stays readable would wake the loop."""
        self.__exit__()
        try:
            await asyncio.sleep(max(0.0, duration_s))
        finally:
            self.__enter__()
