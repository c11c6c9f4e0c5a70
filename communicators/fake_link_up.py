"""A link-up of the fake device that can be given up: it waits for peers that may never come.

What is given up stays in its thread for as long as its library waits. It must hold up no other task of the chip, and
reach into no later generation.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from ..devices.fake_chip import Task
from .rendezvous import ForwardingStore

ABORTED = "aborted"


class StoreOfTask(ForwardingStore):
    """A group's store, for one task: what is abandoned must not reach into the store of the next generation."""

    def __init__(self, store: Any, task: Task) -> None:
        """Forward to `store`, up to the end of `task`."""
        super().__init__()
        self._task = task
        self.forward_to(store)

    @property
    def _inner(self) -> Any:
        if self._task.over:
            raise RuntimeError(ABORTED)
        return super()._inner


def unless_over(task: Task, connect: Callable[[], Any]) -> Any:
    """Return what `connect` returns. Raises what it raises, and RuntimeError when the task is over before.

    A thread of its own waits: the chip has other tasks.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(connect())
        except Exception as error:
            results.put(error)

    threading.Thread(target=run, name="fake-link-up", daemon=True).start()
    task.when_over(lambda: results.put(RuntimeError(ABORTED)))
    found = results.get()
    if isinstance(found, Exception):
        raise found
    return found
