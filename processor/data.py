"""A DataLoader with a position that can be saved and restored.

A plain DataLoader cannot be continued in the middle of an epoch, and each new iterator of it draws from the global
random generator, so that a run that continued would no longer draw the numbers of one that did not. Here the order of
samples and the seeds of workers follow from `seed`, epoch and batch alone. The global generators are left as they are,
except that without workers (`num_workers=0`) a dataset's own random augmentation draws from them in the train thread as
usual; that is captured and rolled back with the rest.
"""

import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..protocol.errors import ConfigurationError, RecoveryError

_EPOCH = "epoch"
_BATCH = "batch"
_START = "start"  # where in the global order of the epoch the present division of it among the ranks begins
_RANKS = "ranks"


class ResumableBatches(Iterable[Any]):
    """The batches of a DataLoader over a map-style dataset, from any epoch and batch.

    `for batch in batches` goes through what is left of the current epoch, and moves on to the next; `endless()`
    continues through epochs. The position counts batches that were handed out, not those that workers have prefetched.
    Register it as `data` of the train state.

    With a DistributedSampler the position is one in the global order of the epoch's samples. If the world has another
    size after a recovery (`scale` in the policy), what is left of the epoch is divided again: each sample is
    handed out once, up to what the sampler repeats or drops at an epoch's end to give all ranks the same number.

    Args:
        loader: A DataLoader over a map-style dataset with a batch size.
        sampler: Its `set_epoch` is called at each epoch; by default the loader's own. A sampler with a `generator`
            (RandomSampler) gets one that follows from `seed` and epoch; any other must give the same order for the
            same epoch.
        seed: From which the order of random samplers and the random numbers of workers follow.

    Raises:
        ConfigurationError: The loader has no positions: an iterable dataset, or no batch size.
    """

    def __init__(self, loader: "DataLoader[Any]", sampler: Any = None, *, seed: int = 0) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise ConfigurationError(
                "ResumableBatches needs a DataLoader over a map-style dataset with a batch size; an iterable dataset "
                "has no positions. Give an object of your own with state_dict and load_state_dict as data"
            )
        chosen: Any = loader.sampler if sampler is None else sampler
        self._sampler = chosen
        self._batches: Any = loader.batch_sampler
        self._seed = seed
        self._epoch = 0
        self._batch = 0  # handed out since `_start`
        self.handed_out = 0  # by this object, whatever the position was set to meanwhile
        self._start = 0
        self._generator = torch.Generator()
        self._iterators = 0  # iterators, counted: an earlier one must not move the position
        self._remaining = _Remaining(self)
        self._loader = self._continued(loader)
        if hasattr(self._sampler, "generator") and self._sampler.generator is None:
            self._sampler.generator = torch.Generator()

    @property
    def epoch(self) -> int:
        """The current epoch, 0-based."""
        return self._epoch

    @property
    def batch(self) -> int:
        """The number of batches of the current epoch that were handed out since the world last changed its size."""
        return self._batch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._batches)

    @property
    def left(self) -> int:
        """The batches that are left of the current epoch."""
        if not self._start:
            return len(self._batches) - self._batch
        return sum(1 for _ in self._divided()) - self._batch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the current epoch.

        Yields:
            What the loader's `collate_fn` makes of a batch: tensors on the CPU by default, pinned as in the loader.

        Raises:
            RecoveryError: The position was set, or another iterator was made, since this one began.
        """
        self._iterators += 1
        this = self._iterators
        self._generator.manual_seed(self._derived(self._epoch, 0))
        for batch in self._loader:
            self._batch += 1
            self.handed_out += 1
            yield batch
            if this != self._iterators:
                raise RecoveryError(
                    "an iterator of ResumableBatches was used after the position was set again or another iterator was "
                    "made. Make a new one, with iter() or endless(), at the start of the train function"
                )
        self._epoch, self._batch, self._start = self._epoch + 1, 0, 0

    def endless(self) -> Iterator[Any]:
        """Iterate over epochs without end, for a loop that counts steps.

        Yields:
            Batches, as `__iter__` does.

        Raises:
            ConfigurationError: The loader has no batches.
        """
        if len(self) == 0:
            raise ConfigurationError("the loader has no batches; is the dataset smaller than one batch (drop_last)?")
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        """Return the position. Cheap: it is captured at every step.

        Returns:
            Epoch, batches handed out, where the present division begins, and among how many ranks it divides.
        """
        return {_EPOCH: self._epoch, _BATCH: self._batch, _START: self._start, _RANKS: self._ranks}

    def advanced(self, state: dict[str, int], count: int) -> dict[str, int]:
        """Return the position `count` batches further on, at which nothing is read. For batches that are left out.

        Args:
            state: A position, as `state_dict` returns it, in a world of this size.
            count: How many batches are not handed out.

        Returns:
            The position behind them.
        """
        whole = len(self._batches)
        in_epoch = whole if not state.get(_START, 0) else self._batch + self.left
        epoch, batch, start = state[_EPOCH], state[_BATCH] + count, state.get(_START, 0)
        while batch >= in_epoch and whole:
            epoch, batch, start, in_epoch = epoch + 1, batch - in_epoch, 0, whole
        return {**state, _EPOCH: epoch, _BATCH: batch, _START: start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position; iterators made before are at their end.

        Args:
            state: What `state_dict` has returned, on this rank or on another one.

        Raises:
            RecoveryError: It was saved by a world of another size, and the sampler has no global order.
        """
        self._epoch, self._batch, self._start = state[_EPOCH], state[_BATCH], state.get(_START, 0)
        self._iterators += 1
        ranks = state.get(_RANKS, self._ranks)
        if ranks != self._ranks:
            size = getattr(self._batches, "batch_size", None)
            if size is None or not isinstance(self._sampler, DistributedSampler):
                raise RecoveryError(
                    f"the data position was saved by {ranks} ranks, this world has {self._ranks}. What is left of the "
                    "epoch can be divided again with a DistributedSampler and a batch size; for data of your own, give "
                    "an object whose load_state_dict does it"
                )
            self._start, self._batch = self._start + ranks * size * self._batch, 0

    def grown(self, world_size: int) -> None:
        """Divide the samples among more ranks from the position that is loaded next, if they are divided among all.

        Args:
            world_size: The number of ranks, of which this one keeps its own.
        """
        sampler = self._sampler
        if not isinstance(sampler, DistributedSampler):
            return
        made: DistributedSampler[Any] = DistributedSampler(sampler.dataset, world_size, 0, drop_last=sampler.drop_last)
        sampler.num_replicas, sampler.num_samples, sampler.total_size = world_size, made.num_samples, made.total_size

    def remaining(self) -> Iterator["_Indices"]:
        """Yield the indices of each batch that is left of this epoch, with the seed for the worker that fetches it."""
        epoch, done = self._epoch, self._batch
        for target in {id(item): item for item in (self._sampler, self._batches)}.values():
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)
        if isinstance(getattr(self._sampler, "generator", None), torch.Generator):
            self._sampler.generator.manual_seed(self._derived(epoch, 0))
        for index, indices in enumerate(self._divided()):
            if index >= done:
                yield _Indices(indices, self._derived(epoch, index + 1))

    @property
    def _ranks(self) -> int:
        """Among how many ranks the samples are divided; 1 where each rank has samples of its own."""
        return int(self._sampler.num_replicas) if isinstance(self._sampler, DistributedSampler) else 1

    def _divided(self) -> Iterator[list[int]]:
        """Return this rank's batches of the epoch, from where the present division begins."""
        sampler = self._sampler
        if not self._start or not isinstance(sampler, DistributedSampler):
            return iter(self._batches)
        whole: DistributedSampler[Any] = copy.copy(sampler)
        total = len(sampler.dataset)  # type: ignore[arg-type]
        whole.num_replicas, whole.rank, whole.num_samples, whole.total_size = 1, 0, total, total
        order = list(whole)
        left: Any = order[self._start :]
        size = DistributedSampler(left, self._ranks, 0, drop_last=sampler.drop_last).total_size
        filled = itertools.islice(itertools.chain(left, itertools.cycle(order)), size)
        mine = list(filled)[sampler.rank :: self._ranks]
        return iter(BatchSampler(mine, self._batches.batch_size, self._batches.drop_last))

    def _derived(self, epoch: int, place: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed}/{epoch}/{place}".encode()) >> 1

    def _continued(self, loader: "DataLoader[Any]") -> "DataLoader[Any]":
        """Make a loader like the given one, over what remains."""
        workers: dict[str, Any] = {}
        if loader.num_workers:
            workers = {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": False,  # their prefetched batches would belong to an earlier iterator
                "multiprocessing_context": loader.multiprocessing_context,
                "timeout": loader.timeout,
                "worker_init_fn": loader.worker_init_fn,
            }
        return DataLoader(
            _Seeded(loader.dataset),
            batch_sampler=self._remaining,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            generator=self._generator,  # so that no iterator draws from the global one
            **workers,
        )


def time_loaders(loading: Callable[[], AbstractContextManager[None]]) -> None:
    """Have each wait for a batch of a DataLoader, in this process and from now on, run inside `loading()`."""
    plain = _BaseDataLoaderIter.__next__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def timed(iterator: Any) -> Any:
        with loading():
            return plain(iterator)

    _BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign, assignment]


class _Indices(list[int]):
    """The indices of a batch, and the seed for fetching it."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _Indices, (list(self), self.seed)


class _Remaining(Sampler[list[int]]):
    """A batch sampler that starts wherever the position is."""

    def __init__(self, batches: ResumableBatches) -> None:
        self._of = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._of.remaining())

    def __len__(self) -> int:
        return self._of.left


class _Seeded(Dataset[Any]):
    """A dataset that seeds a worker before each batch, as the batch may be another worker's after a recovery."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if get_worker_info() is not None and isinstance(indices, _Indices):
            random.seed(indices.seed)
            torch.manual_seed(indices.seed)
            np.random.seed(indices.seed % 2**32)
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(indices))
        return [self._dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self._dataset)
