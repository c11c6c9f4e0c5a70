"""Many collectives of one group may be under way at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

BLOCKS, ROUNDS, AT_ONCE = 10, 10, 64
WHOLE_S = 100.0  # for one collective: the other rank may not run meanwhile


def test_a_gloo_group_has_one_thread(ranks: Ranks) -> None:
    """Of torch's two, each frees the name of the last collective: seen on an idle machine only, and not each time."""

    def count(rank: Rank) -> None:
        rank.join()
        groups = [dist.group.WORLD, dist.new_group([0, 1])]
        backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
        rank.say([backend.options._threads for backend in backends])

    ranks.start_all(2, count)
    assert ranks.hear_all() == [[1, 1], [1, 1]]


@pytest.mark.timeout(300)
def test_coalesced_collectives_that_end_at_the_same_time_leave_the_heap_whole(ranks: Ranks) -> None:
    """torch's two threads for each gloo group can end the process here.

    A busy machine takes half a minute for some of them, so each block has a time of its own.
    """

    def gather(rank: Rank) -> None:
        rank.join(collective_s=WHOLE_S)
        own = torch.full((4,), float(rank.number))
        for block in range(BLOCKS):
            for _ in range(ROUNDS):
                gathered = [torch.empty(8) for _ in range(AT_ONCE)]
                works = []
                for each in gathered:
                    with _coalescing_manager(async_ops=True) as work:
                        dist.all_gather_into_tensor(each, own, async_op=True)
                    works.append(work)
                for work in works:
                    work.wait()
                assert all(each.tolist() == [0.0] * 4 + [1.0] * 4 for each in gathered)
            rank.say(block)

    ranks.start_all(2, gather)
    for block in range(BLOCKS):
        assert ranks.hear_all() == [block, block]
