"""Which of a device's groups come up, in real processes: those that were in use, and no others.

A communicator takes memory of the device, twice HCCL_BUFFSIZE, and a framework makes many more groups than it uses.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from tests.contract import makers

from midstep.communicators.base import DeviceMessage

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 3
VICTIM = 2
# One is asked for twice. In those at USED a collective is done before the fault, in that at UNEVEN by one member only.
GROUPS = ([0, 1], [1, 2], [0, 2], [0, 1])
USED = (1, 3)
UNEVEN = 0
ALONE = GROUPS[UNEVEN][0]
IN_USE = [sum(rank in GROUPS[index] for index in USED) for rank in range(WORLD)]
WITH_UNEVEN = [in_use + (rank in GROUPS[UNEVEN]) for rank, in_use in enumerate(IN_USE)]
UP = ("up", "")

pytestmark = [pytest.mark.makers("fake", "npu"), pytest.mark.timeout(300)]


class Setup(makers.Setup):
    """A rank with its device, its communicator and its groups."""

    def __init__(self, rank: Rank, *, connected: bool = True) -> None:
        super().__init__(rank, GROUPS, connected=connected)

    def use(self, index: int) -> None:
        """Add up ones in a group, if this rank is in it."""
        if self.rank.number in GROUPS[index]:
            place = len([members for members in GROUPS[:index] if self.rank.number in members])
            dist.all_reduce(ones := torch.ones(1), group=self.groups[place])
            assert ones.item() == len(GROUPS[index])

    def built(self) -> int:
        """Return how many communicators of groups take memory of the device."""
        return self.pairs_too()[0]

    def pairs_too(self) -> tuple[int, int]:
        """Return how many communicators of groups and how many of pairs take memory of the device."""
        built: tuple[int, int] = self.maker.communicators()
        return built


def use_some(rank: Rank) -> None:
    """Use some groups, and say how many communicators there are before that, after it and after a recovery."""
    setup = Setup(rank)
    rank.say(setup.built())
    for index in USED:
        setup.use(index)
    rank.say(setup.built())
    recover(setup)


def recover(setup: Setup) -> None:
    """Be connected again, say how many communicators there are; then use the other groups, too."""
    setup.stop_and_clean()
    setup.rank.say(setup.reconnect())
    setup.rank.say(setup.built())
    setup.rank.say(len(setup.communicator.link_up_s))
    setup.check()
    setup.communicator.close()
    setup.rank.say("done")


def join(rank: Rank) -> None:
    """Be a newcomer, which has used nothing."""
    recover(Setup(rank, connected=False))


def expect(ranks: Ranks, built: list[int], generation: int = 1) -> None:
    """Let all reconnect, and expect so many communicators in each rank."""
    ranks.say(generation)
    assert ranks.hear_all() == [UP] * WORLD
    assert ranks.hear_all() == built
    assert ranks.hear_all() == built
    assert ranks.hear_all() == ["done"] * WORLD


def test_groups_that_were_not_used_take_no_memory_when_they_are_resumed(ranks: Ranks) -> None:
    """Nothing is linked at the start, and after a fault what was in use before."""
    ranks.start_all(WORLD, use_some)
    assert ranks.hear_all() == [0] * WORLD
    assert ranks.hear_all() == IN_USE
    expect(ranks, IN_USE)


def test_a_newcomer_hears_which_groups_are_in_use(ranks: Ranks) -> None:
    """It has made the same groups and used none; exactly the others' come up, in all of them."""
    ranks.start_all(WORLD, use_some)
    ranks.hear_all()
    ranks.hear_all()
    ranks.signal(VICTIM, signal.SIGKILL)
    ranks.start(VICTIM, WORLD, join)
    expect(ranks, IN_USE)


def begin_alone(rank: Rank) -> None:
    """Have one rank begin to use a group, and be stopped by another thread before the other member does."""
    setup = Setup(rank)
    for index in USED:
        setup.use(index)
    rank.say("used")
    if rank.number == ALONE:
        stopped: list[bool] = []
        stop = setup.stop

        def stop_and_look(reason: str = "a peer is gone") -> None:
            stop(reason)
            stopped.append(setup.device.stopped)

        setup.stop = stop_and_look  # type: ignore[method-assign]
        stopper = setup.stop_soon()
        with pytest.raises(RuntimeError, match=r"HCCL|FORCE STOP"):
            setup.use(UNEVEN)
        stopper.join()
        rank.say((stopped, setup.device.stopped))
    recover(setup)


def test_a_group_that_one_member_has_begun_to_use_comes_up_in_all_of_them(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree that it is in use.

    A stop that does not end a link-up is put off until the thread comes out of HCCL: CANN would walk through a list of
    communicators that this thread changes.
    """
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "2")
    ranks.start_all(WORLD, begin_alone)
    assert ranks.hear_all() == ["used"] * WORLD
    assert ranks.hear(ALONE) == ([ranks.maker.stop_ends_link_up], True)
    expect(ranks, WITH_UNEVEN)


def begin_until_given_up(rank: Rank) -> None:
    """Have one rank begin to use a group that the other member does not come to, until HCCL gives that up."""
    setup = Setup(rank)
    for index in USED:
        setup.use(index)
    if rank.number == ALONE:
        with pytest.raises(RuntimeError, match="HCCL"):
            setup.use(UNEVEN)
    rank.say("begun")
    recover(setup)


@pytest.mark.makers("npu")  # the fake device's link-ups have no time of their own
def test_a_link_up_that_hccl_has_given_up_is_not_resumed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library counts of it is dropped in all members, which agree that the group is in use."""
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "2")
    ranks.start_all(WORLD, begin_until_given_up)
    assert ranks.hear_all() == ["begun"] * WORLD
    expect(ranks, WITH_UNEVEN)


def send_in_a_pair(rank: Rank) -> None:
    """Use the link of a pair in the world, and nothing else; be connected again; say what was built."""
    setup = Setup(rank)
    place = torch.full((1,), float(rank.number))
    if rank.number < 2:
        dist.send(place, 1) if rank.number == 0 else dist.recv(place, 0)
        assert place.item() == 0.0
    rank.say(setup.pairs_too())
    setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say(setup.pairs_too())
    rank.say(len(setup.communicator.link_up_s))
    setup.check()
    setup.communicator.close()


def test_a_pair_is_linked_without_the_group_that_it_is_in(ranks: Ranks) -> None:
    """It takes a tenth of the memory."""
    ranks.start_all(WORLD, send_in_a_pair)
    assert ranks.hear_all() == [(0, 1), (0, 1), (0, 0)]
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
    assert ranks.hear_all() == [(0, 1), (0, 1), (0, 0)]
    assert ranks.hear_all() == [1, 1, 0]


def swap_alone(rank: Rank, *, connected: bool) -> None:
    """Use a group for batches alone, as stages of a pipeline do; be connected again; say what was built."""
    setup = Setup(rank, connected=connected)
    if connected:
        swap(setup)
        rank.say(setup.built())
        setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say(setup.built())
    swap(setup)
    setup.communicator.close()
    rank.say("swapped")


def swap(setup: Setup) -> None:
    own = setup.rank.number
    if own not in GROUPS[0]:
        return
    group, peer = setup.groups[0], 1 - own
    mine, theirs = (torch.full((4,), float(number)) for number in (own, VICTIM))
    batch = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert theirs.tolist() == [float(peer)] * 4


def test_a_group_that_was_used_for_batches_alone_is_in_use(ranks: Ranks) -> None:
    """Also where torch-npu makes a batch past midstep's group, as it does on CANN before 9.0, and on the fake CANN."""
    ranks.start_all(WORLD, lambda rank: swap_alone(rank, connected=True))
    assert ranks.hear_all() == [1, 1, 0]
    ranks.signal(1, signal.SIGKILL)
    ranks.start(1, WORLD, lambda rank: swap_alone(rank, connected=False))
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
    assert ranks.hear_all() == [1, 1, 0]
    assert ranks.hear_all() == ["swapped"] * WORLD


def carry_shards(rank: Rank) -> None:
    """Be told before a reconnect that shards are to travel between devices; move one between two of three ranks."""
    setup = Setup(rank)
    setup.communicator.carries_shards = True
    setup.stop_and_clean()
    rank.say(setup.reconnect())
    rank.say(setup.built())
    if rank.number < 2:
        shard = torch.full((4,), float(rank.number))
        setup.communicator.exchange([DeviceMessage(shard, 1 - rank.number, rank.number == 0)]).wait()
        setup.device.finish()
        rank.say(shard.tolist())
    setup.communicator.carries_shards = False
    recover(setup)


def test_the_group_of_all_ranks_is_up_where_shards_are_about_to_travel_in_it(ranks: Ranks) -> None:
    """Its communicator needs all ranks to come up, and only some of them move shards."""
    ranks.start_all(WORLD, carry_shards)
    ranks.say(1)
    assert ranks.hear_all() == [UP] * WORLD
    assert ranks.hear_all() == [1] * WORLD
    assert [ranks.hear(rank) for rank in range(2)] == [[0.0] * 4] * 2
    expect(ranks, [1] * WORLD, 2)
