"""Leaves, for a step that was torn out of its schedule, the context in which gradients are not reduced.

Megatron's pipeline schedules enter `no_sync` by hand, and leave it at the last micro-batch. A schedule that is ended by
an exception before that never does: its frame becomes garbage, and Python closes the context when the collector comes
by, which may be in the middle of a later step. From there on gradients of that step would be reduced before they are
complete, with other numbers on each rank, and no error. So open contexts are known here, and are left when the step is
rolled back; what the collector finds afterwards is closed already.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

Enter = Callable[[], AbstractContextManager[Any]]


class NoSync:
    """The contexts of all model chunks that were entered and not left."""

    def __init__(self) -> None:
        self._open: list[_Known] = []

    def watch(self, chunks: Iterable[Any]) -> None:
        """Know of each context from here on, whether a schedule gets it from a chunk or from its configuration."""
        known = {id(chunk): self._known(chunk.no_sync) for chunk in chunks}
        for chunk in chunks:
            given = getattr(chunk.config, "no_sync_func", None)
            if isinstance(given, list | tuple):
                chunk.config.no_sync_func = [_instead_of(each, known) for each in given]
            elif given is not None:
                chunk.config.no_sync_func = _instead_of(given, known)
        for chunk in chunks:
            chunk.no_sync = known[id(chunk)]

    def leave(self) -> None:
        """Leave what a torn schedule has left open. In rollback, before the flags of the next step are set."""
        for context in reversed(self._open.copy()):
            context.__exit__(None, None, None)

    def _known(self, plain: Enter) -> Enter:
        return lambda: _Known(plain(), self._open)


def _instead_of(given: Any, known: dict[int, Enter]) -> Any:
    """Return the known way into a chunk's context for the chunk's own; anything else stays as it is."""
    owner = getattr(given, "__self__", None)
    return known.get(id(owner), given) if getattr(given, "__name__", "") == "no_sync" else given


class _Known(AbstractContextManager[Any]):
    """One context, entered here and left by the schedule, or instead of it."""

    def __init__(self, plain: AbstractContextManager[Any], among: list["_Known"]) -> None:
        self._plain = plain
        self._among = among

    def __enter__(self) -> Any:
        self._among.append(self)
        return self._plain.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self in self._among:
            self._among.remove(self)
            return self._plain.__exit__(kind, error, trace)
        return None
