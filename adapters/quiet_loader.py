"""A data loader of a loop that midstep calls again after a fault: its iterators draw no random numbers."""

from collections.abc import Callable
from typing import Any

from ..processor.local_state import RandomState


class QuietLoader:
    """The loader, but for random numbers: a loop makes an iterator in each call, and in a run without faults one.

    `begun`: whether a step of the job was committed. Before the first one, iterators draw as they do without midstep.
    """

    def __init__(self, loader: Any, begun: Callable[[], bool]) -> None:
        self._loader = loader
        self._begun = begun

    def __iter__(self) -> Any:
        """Make the iterator."""
        if not self._begun():
            return iter(self._loader)
        numbers = RandomState()
        before = numbers.capture()
        made = iter(self._loader)
        numbers.restore(before)
        return made

    def __len__(self) -> int:
        """Return how many batches there are in an epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Have all else of the loader."""
        return getattr(self._loader, name)
