"""NCCL's communicator over a played library, in real processes: handles stay, communicators are new, aborts drain."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from midstep.communicators.nccl import NcclCommunicator
from midstep.communicators.process_group import BackendRegistration
from midstep.protocol.errors import CommunicatorAborted, CommunicatorError, LinkUpFailed, UnsupportedCollective
from midstep.testing.played_nccl import PlayedNccl

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 3
VICTIM = 2
LINK_UP_S = 10.0
GROUPS = ([0, 1], [1, 2], [0, 2], [0, 1])
ROUNDS = 30
WAIT_S = 10.0


class Setup:
    """A rank with its communicator and its groups."""

    def __init__(self, rank: Rank, *, connected: bool = True) -> None:
        self.rank = rank
        self.library = PlayedNccl()
        self.communicator = NcclCommunicator(self.library, BackendRegistration("midstep_played"))
        rank.init(self.communicator, connected=connected)
        made = [dist.new_group(members) for members in GROUPS]
        self.groups = [group for group in made if group != dist.GroupMember.NON_GROUP_MEMBER]

    def check(self) -> None:
        """Add up ones in every group, through the handles that were made at the start."""
        for group in (None, *self.groups):
            ones = torch.ones(3)
            dist.all_reduce(ones, group=group)
            self.library.synchronize()
            assert ones.tolist() == [float(dist.get_world_size(group))] * 3

    def reconnect(self, generation: int) -> str:
        try:
            self.communicator.reconnect(generation, self.rank.store, LINK_UP_S)
        except CommunicatorError as error:
            return f"{type(error).__name__}: {error}"
        return "up"


class Watching:
    """Keeps what a communicator tells of collectives."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def entered(self, op: str, group: tuple[int, ...] = ()) -> None:
        self.told.append(f"entered {op} of {len(group)}")

    def left(self, op: str) -> None:
        self.told.append(f"left {op}")

    def waited(self, seconds: float) -> None:
        assert seconds >= 0


def be_watched(rank: Rank) -> None:
    """Wait for one collective at once, and for another one later."""
    setup = Setup(rank)
    watching = setup.communicator.observer = Watching()
    dist.all_reduce(torch.ones(3))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    watching.told.append("not yet")
    work.wait()
    setup.library.synchronize()
    rank.say(watching.told)
    setup.communicator.close()


def test_a_collective_for_which_the_library_gives_no_work_is_seen_to_end(ranks: Ranks) -> None:
    """Torch's NCCL returns no work where its caller will not wait for it."""
    ranks.start_all(WORLD, be_watched)
    once = [f"entered allreduce of {WORLD}", "left allreduce"]
    assert ranks.hear_all() == [[*once, once[0], "not yet", once[1]]] * WORLD


def record(rank: Rank) -> None:
    """Call a collective while a graph is recorded, and after that."""
    setup = Setup(rank)
    setup.library.records = True
    try:
        dist.all_reduce(torch.ones(3))
    except UnsupportedCollective as error:
        rank.say(str(error))
    setup.library.records = False
    setup.check()
    rank.say("checked")
    setup.communicator.close()


def test_a_collective_is_not_recorded_into_a_graph(ranks: Ranks) -> None:
    """The graph would keep the communicator of one generation."""
    ranks.start_all(WORLD, record)
    assert all("allreduce is called while a graph of the device is recorded" in said for said in ranks.hear_all())
    assert ranks.hear_all() == ["checked"] * WORLD


def survive(rank: Rank) -> None:
    """Wait for the device in a collective that lacks a peer, until the control thread aborts."""
    setup = Setup(rank)
    setup.check()
    rank.say("checked")

    def control() -> None:
        assert rank.hear() == "stop"
        setup.communicator.abort("a peer is gone")

    thread = threading.Thread(target=control, daemon=True)
    thread.start()
    if rank.number == VICTIM:
        time.sleep(WAIT_S)  # it is killed, and takes no part
    gradient = torch.ones(3)
    dist.all_reduce(gradient)
    setup.library.synchronize()  # returns, as a stream does
    rank.say((setup.communicator.failed, gradient.tolist()))
    thread.join(10)
    try:
        dist.all_reduce(gradient)
    except CommunicatorAborted:
        rank.say("refused")
    rank.say(setup.reconnect(rank.hear()))
    setup.check()
    rank.say("checked again")
    setup.communicator.close()


def join_late(rank: Rank) -> None:
    """Make the groups alone, and be connected."""
    setup = Setup(rank, connected=False)
    alone = torch.full((2,), 7.0)
    dist.all_reduce(alone)
    assert alone.tolist() == [7.0, 7.0]
    rank.say(setup.reconnect(rank.hear()))
    setup.check()
    rank.say("checked again")
    setup.communicator.close()


def test_a_lost_peer_is_replaced_behind_the_same_handles(ranks: Ranks) -> None:
    """A thread that waits for the device is released by the abort, and can see that its step is worth nothing."""
    ranks.start_all(WORLD, survive)
    ranks.hear_all()
    ranks.signal(VICTIM, signal.SIGKILL)
    time.sleep(0.3)
    ranks.say("stop")
    drained = ranks.hear_all()
    assert all(failed is not None for failed, _ in drained), drained  # aborted, or the hosts saw the peer go before
    assert ranks.hear_all() == ["refused"] * (WORLD - 1)
    ranks.start(VICTIM, WORLD, join_late)
    ranks.say(1)
    assert ranks.hear_all() == ["up"] * WORLD
    assert ranks.hear_all() == ["checked again"] * WORLD


def wait_in_link_up(rank: Rank) -> None:
    """Be aborted while a peer does not come, then link up with all in the next generation."""
    setup = Setup(rank)
    setup.check()
    rank.say("checked")

    def control() -> None:
        rank.hear()
        setup.communicator.abort("another order")

    thread = threading.Thread(target=control, daemon=True)
    thread.start()
    began_s = time.monotonic()
    if rank.number != VICTIM:
        rank.say((setup.reconnect(1).partition(":")[0], time.monotonic() - began_s < LINK_UP_S / 2))
    thread.join(WAIT_S)
    rank.say(setup.reconnect(rank.hear()))
    setup.check()
    rank.say("checked again")
    setup.communicator.close()


def test_a_link_up_that_lacks_a_peer_is_ended_by_an_abort(ranks: Ranks) -> None:
    """NCCL's own meeting could not be: nobody goes there before all are here."""
    ranks.start_all(WORLD, wait_in_link_up)
    ranks.hear_all()
    time.sleep(0.5)
    ranks.say("abort")
    assert [ranks.hear(number) for number in range(WORLD) if number != VICTIM] == [("CommunicatorAborted", True)] * 2
    ranks.say(2)
    assert ranks.hear_all() == ["up"] * WORLD
    assert ranks.hear_all() == ["checked again"] * WORLD


def recover_often(rank: Rank) -> None:
    """Be aborted and reconnected again and again; say how many threads and backends there are."""
    setup = Setup(rank)
    counts = []
    for generation in range(1, ROUNDS + 1):
        setup.communicator.abort("again")
        assert setup.reconnect(generation) == "up"
        setup.check()
        counts.append((threading.active_count(), len(setup.library.groups), len(os.listdir("/proc/self/fd"))))
    rank.say(counts)
    setup.communicator.close()


def test_thirty_recoveries_leave_no_thread_no_communicator_and_no_descriptor_behind(ranks: Ranks) -> None:
    ranks.start_all(WORLD, recover_often)
    for counts in ranks.hear_all():
        threads, backends, descriptors = zip(*counts, strict=True)
        assert len(set(backends)) == 1, counts
        # Gloo closes behind one's back, so single counts differ by some; what stays would be one each time.
        for kind in (threads, descriptors):
            assert min(kind[-10:]) <= min(kind[5:15]) + 2, counts


def miss_a_peer(rank: Rank) -> None:
    """Try to link up with a rank that has left; say how that ends."""
    setup = Setup(rank)
    rank.say("checked")
    if rank.number == VICTIM:
        return
    try:
        setup.communicator.reconnect(1, rank.store, 1.0)
    except LinkUpFailed as error:
        rank.say(str(error))
    setup.communicator.close()


def test_a_link_up_without_a_peer_ends_in_time_and_names_it(ranks: Ranks) -> None:
    ranks.start_all(WORLD, miss_a_peer)
    ranks.hear_all()
    for number in (0, 1):
        assert f"rank {VICTIM} has not come" in ranks.hear(number)
