"""Batches that can be continued from any place, with and without workers."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

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


def _divided(count: int, rank: int, ranks: int, *, drop_last: bool = False) -> ResumableBatches:
    data = _Numbers(count)
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=ranks, rank=rank, shuffle=True, seed=3, drop_last=drop_last
    )
    return ResumableBatches(DataLoader(data, batch_size=3, sampler=sampler, drop_last=drop_last))


@pytest.mark.parametrize("worlds", [(4, 2), (2, 4), (4, 2, 4), (3, 1, 2)])
def test_a_world_of_another_size_goes_on_in_the_global_order_of_the_epoch(worlds: tuple[int, ...]) -> None:
    """Each sample of the epoch is handed out exactly once, whatever the number of ranks was meanwhile."""
    count, steps = 96, 4
    seen: list[float] = []
    state: dict[str, int] | None = None
    for number, ranks in enumerate(worlds):
        world = [_divided(count, rank, ranks) for rank in range(ranks)]
        for each in world:
            if state is not None:
                each.load_state_dict(state)
        last = number == len(worlds) - 1
        parts = [list(each) if last else list(itertools.islice(each, steps)) for each in world]
        seen += [number for part in parts for batch in part for number in batch.tolist()]
        state = world[0].state_dict()
    assert sorted(seen) == list(map(float, range(count)))


def test_the_epoch_after_a_change_of_size_is_divided_as_usual() -> None:
    """And the batches that are left of the present one are known."""
    first = _divided(24, 0, 4)
    assert len(list(itertools.islice(first, 1))) == 1
    second = _divided(24, 0, 2)
    second.load_state_dict(first.state_dict())
    assert second.left == 2
    assert len(list(second)) == 2
    usual = _divided(24, 0, 2)
    usual.load_state_dict({"epoch": 1, "batch": 0})
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in usual]


def test_with_drop_last_no_sample_is_handed_out_twice() -> None:
    """What does not fill a round of all ranks is left out, as the sampler does at an epoch's end."""
    first = [_divided(31, rank, 4, drop_last=True) for rank in range(4)]
    seen = [number for each in first for batch in itertools.islice(each, 1) for number in batch.tolist()]
    second = [_divided(31, rank, 2, drop_last=True) for rank in range(2)]
    for each in second:
        each.load_state_dict(first[0].state_dict())
    seen += [number for each in second for batch in each for number in batch.tolist()]
    assert len(seen) == len(set(seen)) == 12 + 18


def test_data_without_a_global_order_cannot_be_divided_anew() -> None:
    """The error says what to do."""
    saved = _divided(24, 0, 4).state_dict()
    private = ResumableBatches(DataLoader(_Numbers(24), batch_size=3))
    with pytest.raises(RecoveryError, match="saved by 4 ranks, this world has 1"):
        private.load_state_dict(saved)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 11])
def test_a_position_further_on_is_the_one_that_is_reached(count: int) -> None:
    """Over the ends of epochs; nothing is handed out for it."""
    data = TensorDataset(torch.arange(20.0))
    ahead, there = (ResumableBatches(DataLoader(data, batch_size=5, shuffle=True), seed=1) for _ in range(2))
    reached = there.endless()
    for _ in range(2 + count):
        next(reached)
    stream = ahead.endless()
    next(stream), next(stream)
    ahead.load_state_dict(ahead.advanced(ahead.state_dict(), count))
    assert ahead.handed_out == 2
    assert [next(ahead.endless())[0].tolist()] == [next(reached)[0].tolist()]
