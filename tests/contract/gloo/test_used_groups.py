"""Which of a device's groups come up, in real processes on the fake device: those that were in use, and no others.

A communicator takes memory of the device, and a framework makes many more groups than it uses.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from midstep.communicators.base import DeviceMessage
from midstep.communicators.fake import fake_communicator
from midstep.devices import device_named
from midstep.devices.fake_chip import BUFFER_BYTES, CHIP

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 3
VICTIM = 2
LINK_UP_S = 10.0
WAIT_S = 20.0
ENVIRONMENT = {"HCCL_ASYNC_ERROR_HANDLING": "0"}
# One is asked for twice. In those at USED a collective is done before the fault, in that at UNEVEN by one member only.
GROUPS = ([0, 1], [1, 2], [0, 2], [0, 1])
USED = (1, 3)
UNEVEN = 0
IN_USE = [sum(rank in GROUPS[index] for index in USED) for rank in range(WORLD)]


class Setup:
    """A rank with its device, its communicator and its groups."""

    def __init__(self, rank: Rank, *, connected: bool = True) -> None:
        self.rank = rank
        self.device = device_named("fake")
        self.device.prepare(rank.number, ENVIRONMENT, LINK_UP_S)
        self.communicator = fake_communicator()
        rank.init(self.communicator, connected=connected)
        self.groups = [dist.new_group(members) for members in GROUPS]

    def use(self, index: int) -> None:
        """Add up ones in a group, if this rank is in it."""
        if self.rank.number in GROUPS[index]:
            dist.all_reduce(ones := torch.ones(1), group=self.groups[index])
            assert ones.item() == len(GROUPS[index])

    def built(self) -> int:
        """Return how many communicators take memory of the device."""
        return CHIP.buffer_bytes // BUFFER_BYTES

    def reconnect(self) -> None:
        """Be stopped and cleaned, and connected in the generation that the test says."""
        self.communicator.abort("a peer is gone")
        self.device.stop()
        self.device.clean()
        self.communicator.reconnect(self.rank.hear(), self.rank.store, LINK_UP_S)


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
    setup.reconnect()
    setup.rank.say(setup.built())
    setup.rank.say(len(setup.communicator.link_up_s))
    for index in range(len(GROUPS)):
        setup.use(index)
    dist.all_reduce(ones := torch.ones(1))
    assert ones.item() == WORLD
    setup.communicator.close()
    setup.rank.say("done")


def join(rank: Rank) -> None:
    """Be a newcomer, which has used nothing."""
    recover(Setup(rank, connected=False))


def test_groups_that_were_not_used_take_no_memory_when_they_are_resumed(ranks: Ranks) -> None:
    """Nothing is linked at the start, and after a fault what was in use before."""
    ranks.start_all(WORLD, use_some)
    assert ranks.hear_all() == [0] * WORLD
    assert ranks.hear_all() == IN_USE
    ranks.say(1)
    assert ranks.hear_all() == IN_USE
    assert ranks.hear_all() == IN_USE
    assert ranks.hear_all() == ["done"] * WORLD


def test_a_newcomer_hears_which_groups_are_in_use(ranks: Ranks) -> None:
    """It has made the same groups and used none; exactly the others' come up, in all of them."""
    ranks.start_all(WORLD, use_some)
    ranks.hear_all()
    ranks.hear_all()
    ranks.signal(VICTIM, signal.SIGKILL)
    ranks.start(VICTIM, WORLD, join)
    ranks.say(1)
    assert ranks.hear_all() == IN_USE
    assert ranks.hear_all() == IN_USE
    assert ranks.hear_all() == ["done"] * WORLD


def begin_alone(rank: Rank) -> None:
    """Have one rank begin to use a group, and a fault come before the other member does."""
    setup = Setup(rank)
    for index in USED:
        setup.use(index)
    if rank.number == GROUPS[UNEVEN][0]:
        waiting = threading.Thread(target=_use_until_stopped, args=(setup,), daemon=True)
        waiting.start()
        time.sleep(0.2)
    rank.say("begun")
    recover(setup)


def _use_until_stopped(setup: Setup) -> None:
    try:
        setup.use(UNEVEN)
    except RuntimeError:
        return
    raise AssertionError("a collective of one of two members has ended well")


def test_a_group_that_one_member_has_begun_to_use_comes_up_in_all_of_them(ranks: Ranks) -> None:
    """One has used it for the first time and another one has not: they agree that it is in use."""
    ranks.start_all(WORLD, begin_alone)
    assert ranks.hear_all() == ["begun"] * WORLD
    ranks.say(1)
    expected = [in_use + (rank in GROUPS[UNEVEN]) for rank, in_use in enumerate(IN_USE)]
    assert ranks.hear_all() == expected
    assert ranks.hear_all() == expected
    assert ranks.hear_all() == ["done"] * WORLD


def send_in_a_pair(rank: Rank) -> None:
    """Use the link of a pair in the world, and nothing else; be connected again; say what was built."""
    setup = Setup(rank)
    place = torch.full((1,), float(rank.number))
    if rank.number < 2:
        dist.send(place, 1) if rank.number == 0 else dist.recv(place, 0)
        assert place.item() == 0.0
    rank.say(setup.built())
    recover(setup)


def test_a_pair_is_linked_without_the_group_that_it_is_in(ranks: Ranks) -> None:
    ranks.start_all(WORLD, send_in_a_pair)
    assert ranks.hear_all() == [1, 1, 0]
    ranks.say(1)
    assert ranks.hear_all() == [1, 1, 0]
    assert ranks.hear_all() == [1, 1, 0]
    assert ranks.hear_all() == ["done"] * WORLD


def carry_shards(rank: Rank) -> None:
    """Be told before a reconnect that shards are to travel between devices; move one between two of three ranks."""
    setup = Setup(rank)
    setup.communicator.carries_shards = True
    setup.reconnect()
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
    assert ranks.hear_all() == [1] * WORLD
    assert [ranks.hear(rank) for rank in range(2)] == [[0.0] * 4] * 2
    ranks.say(2)
    assert ranks.hear_all() == [1] * WORLD
    assert ranks.hear_all() == [1] * WORLD
    assert ranks.hear_all() == ["done"] * WORLD
