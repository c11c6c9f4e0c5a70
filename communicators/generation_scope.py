"""The time from one seating to the next, and how it ends.

Every collective belongs to the scope in which it was started. When the scope ends, by an abort or by a failure, all its
collectives end with it, wherever they wait; a scope never comes back.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..protocol.errors import CommunicatorAborted, CommunicatorError, CommunicatorFailed

_SETTLE_S = 0.1  # how long a reconnect waits for the backend to let go of the tensors of aborted collectives
_PAUSE_S = 0.001
_ADVICE = "This is typically caused by"


class InFlight(Protocol):
    """Something under way that must not outlast the scope."""

    def scope_ended(self) -> None:
        """The scope has ended: stop waiting. Any thread; must not block."""
        ...

    def finished(self) -> bool:
        """Say whether the backend has let go of the tensors."""
        ...


class GenerationScope:
    """One seating of all groups of a process."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        """Start a scope; `on_failure` is called, in any thread, when a collective was the first to fail."""
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._in_flight: set[InFlight] = set()
        self._kind: type[CommunicatorError] = CommunicatorAborted
        self.reason: str | None = None

    @property
    def aborted(self) -> bool:
        """Say whether the scope is over because of an abort."""
        return self.reason is not None and self._kind is CommunicatorAborted

    def end(self, kind: type[CommunicatorError], reason: str) -> bool:
        """End the scope and wake all that waits. Returns False if it was over before."""
        with self._lock:
            if self.reason is not None:
                return False
            self._kind = kind
            self.reason = reason
            in_flight = list(self._in_flight)
        for work in in_flight:
            work.scope_ended()
        return True

    def fail(self, op: str, error: BaseException) -> CommunicatorError:
        """Take note that `op` failed with `error`; return what its caller must raise."""
        if self.end(CommunicatorFailed, f"{op} failed: {cause(error)}"):
            self._on_failure()
        return self.error(op)

    def error(self, op: str) -> CommunicatorError:
        """Return the exception for `op` in a scope that is over."""
        return self._kind(f"{op} cannot be done: {self.reason}; the groups must be seated for a new generation")

    def add(self, work: InFlight) -> None:
        """Have `work` woken at the end; at once if that has come."""
        with self._lock:
            if self.reason is None:
                self._in_flight.add(work)
                return
        work.scope_ended()

    def discard(self, work: InFlight) -> None:
        """Forget `work`: it is done."""
        with self._lock:
            self._in_flight.discard(work)

    def unfinished(self) -> list[InFlight]:
        """Return what was under way at the end and may still touch its tensors."""
        with self._lock:
            return [work for work in self._in_flight if not work.finished()]


def cause(error: BaseException) -> str:
    """Return what an error says, without the place in gloo's sources before it and the advice behind it."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    text = lines[0].partition(_ADVICE)[0].strip(" .")
    place, _, rest = text.partition("] ")
    return rest if place.startswith("[") and rest else text


def settle(scope: GenerationScope) -> None:
    """Give the backend a moment to let go of the tensors of a scope that is over.

    Sockets that are shut down end its operations within milliseconds. A send that missed the news stays until the
    collective's timeout; it only reads its tensor.
    """
    end = time.monotonic() + _SETTLE_S
    while scope.unfinished() and time.monotonic() < end:
        time.sleep(_PAUSE_S)
