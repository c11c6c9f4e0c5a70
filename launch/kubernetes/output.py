"""Shows what the containers of a job print, each line once, however often the API goes away meanwhile."""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing

from ...platforms.kubernetes.api import Api, RequestRefused, Unavailable, pause_s

MOST_SHOWN = 16  # pods at once
_MARGIN_S = 5  # what is asked for again: the host's clock and a slow line


class Output:
    """Shows the output of one container in each of some pods. `show` takes a line."""

    def __init__(self, api: Api, container: str, show: Callable[[str], None]) -> None:
        self._api = api
        self._container = container
        self._show = show
        self._running: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, pod: str) -> None:
        """Show what a pod prints from now on, and has printed, unless many are shown. Idempotent."""
        self._running.add(pod)
        if pod not in self._tasks and len(self._tasks) < MOST_SHOWN:
            self._tasks[pod] = asyncio.create_task(self._follow(pod))

    def finish(self, pod: str) -> None:
        """Note that a pod has ended: what it has printed is shown to its end. Idempotent."""
        self._running.discard(pod)

    def drop(self, pod: str) -> None:
        """Forget a pod that is gone, and its output with it. Idempotent."""
        self.finish(pod)
        if pod in self._tasks:
            self._tasks.pop(pod).cancel()

    def keep(self, pods: set[str]) -> None:
        """Forget all pods but these: the others are gone."""
        for pod in self._tasks.keys() - pods:
            self.drop(pod)

    async def last_lines(self, limit_s: float) -> None:
        """Wait until the output of all pods has ended, for a while."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=limit_s)

    async def close(self) -> None:
        """Show no more. Idempotent."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, pod: str) -> None:
        clock = asyncio.get_running_loop().time
        last, shown_at, failures = "", 0.0, 0
        while True:
            ends = pod not in self._running
            since_s = math.ceil(clock() - shown_at) + _MARGIN_S if last else None
            try:
                async with aclosing(self._api.log(pod, self._container, since_s)) as lines:
                    async for written, text in lines:
                        if written > last:
                            last, shown_at, failures = written, clock(), 0
                            self._show(text)
                if ends:
                    return
            except RequestRefused:
                return
            except Unavailable:
                pass
            await asyncio.sleep(pause_s(failures))
            failures += 1
