"""Batches that can be continued from any place, with and without workers."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from midstep.processor.data import ResumableBatches
from midstep.protocol.errors import ConfigurationError, RecoveryError


class _Numbers(Dataset[torch.Tensor]):
    """Item i is i, plus noise from the global generators if asked for."""

    def __init__(self, count: int, noisy: bool = False) -> None:
        self._count = count
        self._noisy = noisy

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = (random.random() + torch.rand(()).item()) / 4 if self._noisy else 0.0
        return torch.tensor(index + noise)


def _make(kind: str) -> ResumableBatches:
    data = _Numbers(23, noisy="noisy" in kind)
    workers = 2 if "workers" in kind else 0
    if "distributed" in kind:
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)
        return ResumableBatches(DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers))
    if "weighted" in kind:
        weighted = WeightedRandomSampler([1.0] * 23, 23)
        return ResumableBatches(DataLoader(data, batch_size=4, sampler=weighted))
    return ResumableBatches(DataLoader(data, batch_size=4, shuffle="shuffle" in kind, num_workers=workers), seed=5)


def _take(batches: ResumableBatches, count: int) -> list[list[float]]:
    return [batch.tolist() for batch in itertools.islice(batches.endless(), count)]


@pytest.mark.parametrize("kind", ["plain", "shuffle", "distributed", "weighted", "shuffle workers noisy"])
@pytest.mark.parametrize("at", [0, 2, 6, 8])
def test_batches_go_on_from_where_they_were(kind: str, at: int) -> None:
    """A new object at a saved position gives what the first one would have given, across epochs."""
    if "workers" in kind and at not in (0, 2):
        pytest.skip("starting workers is slow, and two places show it")
    whole = _take(_make(kind), 14)
    first = _make(kind)
    assert _take(first, at) == whole[:at]
    second = _make(kind)
    second.load_state_dict(first.state_dict())
    assert _take(second, 14 - at) == whole[at:]


def test_epochs_differ_and_cover_the_data() -> None:
    """Each epoch is another order of all samples."""
    batches = _make("shuffle")
    epochs = [[value for batch in batches for value in batch.tolist()] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [sorted(epoch) for epoch in epochs] == [[float(i) for i in range(23)]] * 2
    assert (batches.epoch, batches.batch) == (2, 0)


def test_the_global_generators_are_left_alone() -> None:
    """So a run that was continued draws the same numbers as one that was not."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    _take(_make("shuffle"), 9)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_drawn_in_the_train_thread_follows_the_global_generators() -> None:
    """It is captured and rolled back with them."""
    torch.manual_seed(1)
    random.seed(1)
    whole = _take(_make("shuffle noisy"), 4)
    torch.manual_seed(1)
    random.seed(1)
    first = _make("shuffle noisy")
    begun = _take(first, 2)
    state, numbers, python = first.state_dict(), torch.get_rng_state(), random.getstate()
    _take(first, 1)  # the step that is interrupted
    torch.set_rng_state(numbers)
    random.setstate(python)
    first.load_state_dict(state)
    assert begun + _take(first, 2) == whole


def test_an_iterator_of_an_earlier_life_is_refused() -> None:
    """It would move the position of the present one."""
    batches = _make("plain")
    old = iter(batches)
    next(old)
    batches.load_state_dict({"epoch": 0, "batch": 0})
    with pytest.raises(RecoveryError, match="new one"):
        next(old)


def test_loaders_without_positions_are_refused() -> None:
    """Iterable datasets, and loaders that do not make batches."""

    class _Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ConfigurationError, match="iterable"):
        ResumableBatches(DataLoader(_Stream()))
    with pytest.raises(ConfigurationError, match="batch size"):
        ResumableBatches(DataLoader(_Numbers(3), batch_size=None))


def test_an_endless_loop_over_nothing_is_refused() -> None:
    """It would never give a batch."""
    empty = ResumableBatches(DataLoader(_Numbers(3), batch_size=4, drop_last=True))
    with pytest.raises(ConfigurationError, match="no batches"):
        next(empty.endless())
