"""A data iterator that can be put at any sample, for loaders that Megatron builds from the consumed samples."""

from collections.abc import Callable, Iterator
from typing import Any


class FromSample(Iterator[Any]):
    """A data iterator that is built again at the sample where training continues.

    Args:
        build: Called with the consumed samples of the whole job, when the first batch is wanted and after each
            recovery. Returns an iterator whose first micro-batch is the one after them, as Megatron's
            `build_pretraining_data_loader` does.
        consumed_samples: Where training starts.
    """

    def __init__(self, build: Callable[[int], Iterator[Any]], consumed_samples: int = 0) -> None:
        self._build = build
        self._consumed = consumed_samples
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._build(self._consumed))
        return next(self._batches)

    def rebuild(self, consumed_samples: int) -> None:
        """Go on after this many samples. Runs in rollback."""
        self._consumed, self._batches = consumed_samples, None
