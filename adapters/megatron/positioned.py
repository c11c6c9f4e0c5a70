"""Data loaders of Megatron-LM whose iterators know their position, and can be put back to it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any


class Loader:
    """What Megatron-LM's `build_pretraining_data_loader` returns, with iterators that count what they hand out."""

    def __init__(self, build: Callable[[int], Any], consumed_samples: int, first: Any) -> None:
        self._build = build
        self._consumed = consumed_samples
        self._first = first

    @classmethod
    def of(cls, plain: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Return a function that builds such loaders with Megatron-LM's own."""

        @functools.wraps(plain)
        def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
            first = plain(dataset, consumed_samples)
            sampler = getattr(first, "batch_sampler", None)
            if not hasattr(sampler, "micro_batch_times_data_parallel_size"):
                return first  # none on this rank, or one of the user's own
            return cls(functools.partial(plain, dataset), consumed_samples, first)

        return build_pretraining_data_loader

    def __iter__(self) -> Iterator[Any]:
        return Positioned(self._build, self._consumed, self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


class Positioned(Iterator[Any]):
    """An iterator over micro-batches that counts the samples of the whole job that they are of."""

    def __init__(self, build: Callable[[int], Any], consumed_samples: int, loader: Any) -> None:
        self._build = build
        self._consumed = consumed_samples
        self._samples = loader.batch_sampler.micro_batch_times_data_parallel_size
        self._batches = iter(loader)

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._consumed += self._samples
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"consumed_samples": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position. In rollback.

        Torch's iterators draw a random number when they are made. This one is made at once, as Megatron-LM makes it
        before training, and not with the first batch: random numbers are put back after the data.
        """
        self._consumed = state["consumed_samples"]
        self._batches = iter(self._build(self._consumed))
