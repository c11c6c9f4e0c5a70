"""Many collectives of one group may be under way at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

ROUNDS, AT_ONCE = 100, 64


def test_coalesced_collectives_that_end_at_the_same_time_leave_the_heap_whole(ranks: Ranks) -> None:
    """torch's two threads for each gloo group end the process here: they free the name of the last collective twice."""

    def gather(rank: Rank) -> None:
        rank.join()
        own = torch.full((4,), float(rank.number))
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
        rank.say("whole")

    ranks.start_all(2, gather)
    assert ranks.hear_all() == ["whole", "whole"]
