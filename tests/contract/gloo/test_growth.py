"""A world gets more ranks while its groups, and what holds them, stay the same objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from tests.contract.gloo.test_reconnect import make_model, reconnect_until_up, recover

from midstep.adapters.ddp.buckets import BucketLayout
from midstep.protocol.errors import CommunicatorError, ConfigurationError

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

SMALL, LARGE = 2, 4


def check(rank: Rank, model: torch.nn.Module, whole: dist.ProcessGroup, size: int) -> None:
    """Use what was made: the default group, another one of all ranks, and DDP, which divides by their number."""
    assert dist.get_world_size() == whole.size() == size
    assert dist.get_process_group_ranks(whole) == list(range(size))
    assert [dist.get_global_rank(whole, place) for place in range(size)] == list(range(size))
    for group in (None, whole):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [float(size)] * 3
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([float(rank.number)]))
    assert [part.item() for part in parts] == [float(number) for number in range(size)]
    model.zero_grad()
    model(torch.full((1, 8), float(rank.number))).sum().backward()
    (bias,) = [each.grad for name, each in model.named_parameters() if name.endswith("1.bias")]
    assert bias is not None
    assert bias.tolist() == [1.0] * 4  # the mean of ones: a sum over more ranks than it is divided by would be larger


def train(rank: Rank, *, newcomer: bool) -> None:
    """Train, and train on in a larger world."""
    communicator = rank.join(connected=not newcomer)
    communicator.only_whole_groups()
    whole = dist.new_group()
    model = make_model()
    layout = BucketLayout("model", model)
    if not newcomer:
        check(rank, model, whole, rank.world_size)
        if rank.world_size > 1:
            with pytest.raises(ConfigurationError, match="can grow with it"):
                dist.new_group([rank.number])
        rank.say("small")
        communicator.abort("the world grows")
        with pytest.raises(CommunicatorError):
            dist.all_reduce(torch.ones(1))
        layout.renew()
        communicator.grow(LARGE)
    reconnect_until_up(communicator, rank, rank.hear)
    check(rank, model, whole, LARGE)
    dist.barrier(group=whole)
    rank.say("large")
    communicator.close()


@pytest.mark.parametrize("small", [1, SMALL])
def test_ranks_join_a_world_whose_groups_and_models_stay(ranks: Ranks, small: int) -> None:
    """The mean that DDP takes is one over all ranks that there are, also where a rank was alone before."""
    for number in range(small):
        ranks.start(number, small, lambda rank: train(rank, newcomer=False))
    assert set(ranks.hear_all()) == {"small"}
    for number in range(small, LARGE):
        ranks.start(number, LARGE, lambda rank: train(rank, newcomer=True))
    recover(ranks, 1)
    assert set(ranks.hear_all()) == {"large"}
