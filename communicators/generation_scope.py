"""The scope of a generation: the collectives that were started in it, and how they all end with it.

A communicator opens a scope when it connects its groups. An abort or the first failure ends the scope, and with it
every collective that was started in it, wherever its caller waits. A scope never reopens; a reconnect opens the next.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..protocol.errors import CommunicatorAborted, CommunicatorError, CommunicatorFailed

_RELEASE_S = 0.1  # how long a reconnect waits for the backend to release the tensors of aborted collectives
_PAUSE_S = 0.001
_ADVICE = "This is typically caused by"


class InFlight(Protocol):
    """A collective under way that must not outlast its scope."""

    def scope_ended(self) -> None:
        """Stop waiting: the scope has ended. Any thread; must not block."""
        ...

    def finished(self) -> bool:
        """Return whether the backend has released the tensors."""
        ...


class GenerationScope:
    """One connection of all groups of a process, from `reconnect` to the abort or failure that ends it."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        """Open a scope; `on_failure` is called, in any thread, when a collective was the first to fail."""
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._in_flight: set[InFlight] = set()
        self._kind: type[CommunicatorError] = CommunicatorAborted
        self.reason: str | None = None

    @property
    def aborted(self) -> bool:
        """Return whether the scope was ended by an abort."""
        return self.reason is not None and self._kind is CommunicatorAborted

    def end(self, kind: type[CommunicatorError], reason: str) -> bool:
        """End the scope and wake all its waiting callers. Return False if it was over before."""
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
        """End the scope because `op` failed with `error`; return what its caller must raise."""
        if self.end(CommunicatorFailed, f"{op} failed: {error_text(error)}"):
            self._on_failure()
        return self.error(op)

    def error(self, op: str) -> CommunicatorError:
        """Return the exception for `op` in a scope that is over."""
        return self._kind(f"{op} cannot be done: {self.reason}; the groups must be reconnected in a new generation")

    def add(self, work: InFlight) -> None:
        """Wake `work` when the scope ends; at once if it is over."""
        with self._lock:
            if self.reason is None:
                self._in_flight.add(work)
                return
        work.scope_ended()

    def discard(self, work: InFlight) -> None:
        """Forget `work`: it is complete."""
        with self._lock:
            self._in_flight.discard(work)

    def unfinished(self) -> list[InFlight]:
        """Return what was under way at the end and may still access its tensors."""
        with self._lock:
            return [work for work in self._in_flight if not work.finished()]

    def wait_released(self) -> None:
        """Wait a moment for the backend to release the tensors, once the scope is over.

        Sockets that are shut down end its operations within milliseconds. A send that missed the shutdown stays until
        the collective's timeout; it only reads its tensor.
        """
        end = time.monotonic() + _RELEASE_S
        while self.unfinished() and time.monotonic() < end:
            time.sleep(_PAUSE_S)


def incomplete_group(missing: Sequence[int], generation: int) -> GenerationScope:
    """Return the ended scope of a group that the ranks `missing` have not made: every collective raises."""
    scope = GenerationScope(lambda: None)
    ranks = ", ".join(str(rank) for rank in missing)
    scope.end(
        CommunicatorFailed,
        f"rank {ranks}, which joined in generation {generation}, has not made this group; make groups before the "
        "train function, or again at its beginning",
    )
    return scope


def error_text(error: BaseException) -> str:
    """Return what an error says, without gloo's source location before it and its advice behind it."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    text = lines[0].partition(_ADVICE)[0].strip(" .")
    location, _, rest = text.partition("] ")
    return rest if location.startswith("[") and rest else text
