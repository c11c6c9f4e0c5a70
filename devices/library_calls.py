"""Calls into HCCL that nothing can interrupt, and the stop of the device, which must not meet them.

CANN's abort of a device walks through the communicators of the process without the lock under which one is added when
it is built, and removed when it is dropped. A process that does both at once may crash (docs/npu.md), and the abort
would not end such a call. So a stop that comes meanwhile is put off: the thread that comes out of the library last
stops the device, before it does anything else. What that thread has just queued on the device may wait for a rank that
is gone, and the stop is what ends it.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("midstep")


class LibraryCalls:
    """The calls of one process that are under way, each with what it does, in words."""

    def __init__(self) -> None:
        """Start with none."""
        self._lock = threading.Lock()
        self._inside: list[str] = []
        self._put_off: Callable[[], None] | None = None
        self._restart: Callable[[], None] | None = None  # due after a stop that was put off

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Surround a call. Waits for a stop that is under way; runs one that was put off. Raises what that raises."""
        with self._lock:
            self._inside.append(what)
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(what)
                if not self._inside and self._put_off is not None:
                    stop, self._put_off = self._put_off, None
                    stop()

    def stop(self, stop: Callable[[], None], restart: Callable[[], None]) -> None:
        """Run `stop`, which stops the device, now or as soon as no call is under way. Raises what it raises.

        `restart`: what has to follow where the stop came too late for the train thread to see to it.
        """
        with self._lock:
            if not self._inside:
                stop()
                return
            if self._put_off is None:
                _log.warning(
                    "the device is not stopped yet: a thread is inside HCCL (%s), which nothing ends before HCCL does, "
                    "after HCCL_CONNECT_TIMEOUT at the latest. If the controller cannot wait so long, it replaces this "
                    "process",
                    "; ".join(self._inside),
                )
            self._put_off, self._restart = stop, restart

    def restart(self) -> None:
        """Have a device that was stopped late take work again. Raises what that raises."""
        with self._lock:
            restart, self._restart = self._restart, None
        if restart is not None:
            restart()

    @contextmanager
    def no_stop(self) -> Iterator[None]:
        """Have no stop begin inside."""
        with self._lock:
            yield


# There is one device in a process, and one library.
LIBRARY_CALLS = LibraryCalls()
