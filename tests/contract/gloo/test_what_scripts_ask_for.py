"""Scripts ask for collectives that gloo refuses, for groups of a backend, and for the devices of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.contract.makers import Setup
from torch._C import _distributed_c10d

from midstep.protocol.errors import UnsupportedCollective

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 2
LINK_UP_S = 20.0


def refused(rank: Rank) -> None:
    communicator = rank.join()
    make: Any = vars(_distributed_c10d)["_make_nccl_premul_sum"]
    half = make(0.5)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: dist.all_reduce(torch.ones(2), op=half),
        lambda: dist.reduce_scatter_tensor(torch.ones(1, dtype=torch.uint16), torch.ones(2, dtype=torch.uint16)),
        lambda: dist.all_reduce(torch.ones(2), op=half, async_op=True).get_future().wait(),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint16)),
    )
    for call in calls:
        try:
            call()
        except UnsupportedCollective as error:
            rank.say(str(error))
        else:
            rank.say("it was done")
    total = torch.ones(2)
    dist.all_reduce(total)
    rank.say((communicator.failed, total.tolist()))


def test_a_collective_that_gloo_refuses_is_the_scripts_error_and_leaves_the_links_up(ranks: Ranks) -> None:
    """The next collective is done."""
    ranks.start_all(WORLD, refused)
    for op in ("allreduce", "reduce_scatter", "allreduce", "allreduce"):
        for said in ranks.hear_all():
            assert op in said
            assert "Gloo" in said or "scalar type" in said
    assert ranks.hear_all() == [(None, [2.0, 2.0])] * WORLD


def groups_on_gloo(rank: Rank) -> None:
    communicator = rank.join()
    total = torch.ones(1)
    whole = dist.new_group(backend="gloo")
    dist.all_reduce(total, group=whole)
    rank.say((total.item(), dist.get_backend(whole), [str(each) for each in whole._device_types]))
    communicator.abort("a rank is lost")
    rank.hear()
    communicator.reconnect(1, rank.store, LINK_UP_S)
    dist.all_reduce(total, group=whole)
    rank.say(total.item())


def test_a_group_that_is_asked_for_on_gloo_is_reconnected_with_the_others(ranks: Ranks) -> None:
    """It says that it takes tensors of the CPU."""
    ranks.start_all(WORLD, groups_on_gloo)
    assert ranks.hear_all() == [(2.0, "midstep_gloo", ["cpu"])] * WORLD
    ranks.say("go on")
    assert ranks.hear_all() == [4.0] * WORLD


def elsewhere_by_default(rank: Rank) -> None:
    torch.set_default_device("meta")
    communicator = rank.join()
    communicator.abort("a rank is lost")
    communicator.reconnect(rank.hear(), rank.store, LINK_UP_S)
    total = torch.ones(1, device="cpu")
    dist.all_reduce(total)
    rank.say(total.item())


def test_a_scripts_default_device_is_not_where_links_are_checked(ranks: Ranks) -> None:
    """Gloo takes tensors of the host, whatever `torch.set_default_device` says."""
    ranks.start_all(WORLD, elsewhere_by_default)
    ranks.say(1)
    assert ranks.hear_all() == [2.0] * WORLD


def beside_a_device(rank: Rank) -> None:
    setup = Setup(rank)
    whole, total = dist.new_group(backend="gloo"), torch.ones(1, device="cpu")
    dist.all_reduce(total, group=whole)
    rank.say((total.item(), dist.get_backend(whole)))
    setup.stop_and_clean()
    setup.reconnect()
    dist.all_reduce(total, group=whole)
    rank.say(total.item())


@pytest.mark.makers("fake", "npu")
def test_a_job_on_a_device_has_groups_on_gloo_for_what_is_in_host_memory(ranks: Ranks) -> None:
    ranks.start_all(WORLD, beside_a_device)
    assert ranks.hear_all() == [(2.0, "midstep_gloo")] * WORLD
    ranks.say(1)
    assert ranks.hear_all() == [4.0] * WORLD
