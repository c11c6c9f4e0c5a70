"""Data iterators that know their position in samples of the whole job, and can be restored to it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

Hand = Callable[[Any], Any]
"""Takes a micro-batch, and returns it, or the one of another rank whose step is repeated here."""


def as_it_is(batch: Any) -> Any:
    """Return a micro-batch of this rank."""
    return batch


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
        self.hand: Hand = as_it_is

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._build(self._consumed))
        return self.hand(next(self._batches))

    def rebuild(self, consumed_samples: int) -> None:
        """Continue after this many samples. Runs in rollback."""
        self._consumed, self._batches = consumed_samples, None


class PositionedLoader:
    """A loader of Megatron-LM's `build_pretraining_data_loader` whose iterators count what they return."""

    def __init__(self, build: Callable[[int], Any], consumed_samples: int, first: Any) -> None:
        self._build = build
        self._consumed = consumed_samples
        self._first = first

    @classmethod
    def of(cls, plain: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Wrap Megatron-LM's function such that it returns loaders of this class."""

        @functools.wraps(plain)
        def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
            first = plain(dataset, consumed_samples)
            sampler = getattr(first, "batch_sampler", None)
            if not hasattr(sampler, "micro_batch_times_data_parallel_size"):
                return first  # none on this rank, or one of the user's own
            return cls(functools.partial(plain, dataset), consumed_samples, first)

        return build_pretraining_data_loader

    def __iter__(self) -> Iterator[Any]:
        return PositionedIterator(self._build, self._consumed, self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


class PositionedIterator(Iterator[Any]):
    """An iterator over micro-batches that counts the samples of the whole job that they belong to."""

    def __init__(self, build: Callable[[int], Any], consumed_samples: int, loader: Any) -> None:
        self._build = build
        self._consumed = consumed_samples
        self._samples = loader.batch_sampler.micro_batch_times_data_parallel_size
        self._batches = iter(loader)
        self.hand: Hand = as_it_is

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._consumed += self._samples
        return self.hand(batch)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"consumed_samples": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position. Runs in rollback.

        Torch's iterators draw a random number when they are made. This one is made at once, as Megatron-LM makes it
        before training, and not with the first batch: random numbers are restored after the data.
        """
        self._consumed = state["consumed_samples"]
        self._batches = iter(self._build(self._consumed))
