"""Pairs of ranks are linked, and move state, while the groups of all ranks are not up yet."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from midstep.protocol.errors import CommunicatorError, CommunicatorFailed, LinkUpFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.gloo.conftest import Rank, Ranks

    from midstep.communicators.gloo.communicator import GlooCommunicator
    from midstep.communicators.pair_sockets import PairSockets

SOURCE, DESTINATION, THIRD = 0, 1, 2
LINK_UP_S = 20.0
PIECES, PIECE = 20, 1_000_003  # more than the sockets between two ranks hold
CYCLES = 12
SETTLED_S = 10.0


def state(number: int) -> torch.Tensor:
    return torch.arange(number, number + PIECE, dtype=torch.float32)


def send(links: PairSockets, count: int = PIECES) -> None:
    for handle in [links.isend(state(number), DESTINATION) for number in range(count)]:
        handle.wait()


def send_less(rank: Rank, links: PairSockets) -> None:
    """Send less than is expected, and keep the link until the test says something."""
    send(links, 2)
    rank.say("sent")
    rank.hear()


def receive(links: PairSockets) -> bool:
    """Return whether all that the source sends has arrived."""
    rooms = [torch.zeros(PIECE) for _ in range(PIECES)]
    for handle in [links.irecv(room, SOURCE) for room in rooms]:
        handle.wait()
    return all(torch.equal(room, state(number)) for number, room in enumerate(rooms))


def begin(links: PairSockets, peer: int, work: Callable[[PairSockets], Any]) -> Future[Any]:
    """Link the pair and do `work` in a thread; close the links in it, as their owner does."""
    pool = ThreadPoolExecutor(1)

    def run() -> Any:
        try:
            links.connect([peer])
            return work(links)
        finally:
            links.close()

    done = pool.submit(run)
    pool.shutdown(wait=False)
    return done


def outcome(done: Future[Any]) -> str:
    try:
        return str(done.result(LINK_UP_S))
    except CommunicatorError as error:
        return type(error).__name__


def begin_early(rank: Rank, communicator: GlooCommunicator, generation: int = 1) -> tuple[PairSockets, Future[Any]]:
    links = communicator.open_pairs(generation, rank.store, LINK_UP_S)
    if rank.number == SOURCE:
        return links, begin(links, DESTINATION, send)
    return links, begin(links, SOURCE, receive)


def move_early(rank: Rank) -> None:
    """Move state in a thread, and link up all groups meanwhile. The third rank has no part in it."""
    communicator = rank.join(connected=False)
    if rank.number == THIRD:
        links = communicator.open_pairs(1, rank.store, LINK_UP_S)
        communicator.reconnect(1, rank.store, LINK_UP_S)
    else:
        links, done = begin_early(rank, communicator)
        done.add_done_callback(lambda done: rank.say(("moved", outcome(done))))
        communicator.reconnect(1, rank.store, LINK_UP_S)
    dist.all_reduce(torch.ones(1))
    rank.say(("up", links.agreed))


def test_a_pair_moves_state_before_a_third_rank_has_come(ranks: Ranks) -> None:
    """The groups need all three ranks; what the pair moves is there when the third is started."""
    for number in (SOURCE, DESTINATION):
        ranks.start(number, 3, move_early)
    assert ranks.hear(SOURCE) == ("moved", "None")
    assert ranks.hear(DESTINATION) == ("moved", "True")
    ranks.start(THIRD, 3, move_early)
    assert ranks.hear_all() == [("up", True)] * 3


def take_part_or_not(rank: Rank) -> None:
    communicator = rank.join(connected=False)
    if rank.number == SOURCE:
        communicator.reconnect(1, rank.store, LINK_UP_S)
        communicator.isend(torch.full((5,), 7.0), DESTINATION).wait()
        rank.say("sent in the ordinary way")
        return
    links, done = begin_early(rank, communicator)
    communicator.reconnect(1, rank.store, LINK_UP_S)
    agreed = links.agreed
    links.abort("not all take part")
    room = torch.zeros(5)
    communicator.irecv(room, SOURCE).wait()
    rank.say((agreed, outcome(done), room.tolist()))


def test_who_waits_for_a_peer_that_takes_no_part_learns_it_with_the_link_up(ranks: Ranks) -> None:
    """Then both move in the ordinary way."""
    ranks.start_all(2, take_part_or_not)
    assert ranks.hear(SOURCE) == "sent in the ordinary way"
    assert ranks.hear(DESTINATION) == (False, "CommunicatorAborted", [7.0] * 5)


def object_alone(rank: Rank) -> None:
    communicator = rank.join(connected=False)
    if rank.number == THIRD:
        communicator.reconnect(1, rank.store, LINK_UP_S)
        rank.say(None)
        return
    links, done = begin_early(rank, communicator)
    communicator.reconnect(1, rank.store, LINK_UP_S)
    rank.say((outcome(done) in {"None", "True"}, links.agreed))


def test_one_rank_that_takes_no_part_is_enough_for_all(ranks: Ranks) -> None:
    """Both ends of every pair have to know the same, also where they have moved everything."""
    ranks.start_all(3, object_alone)
    assert ranks.hear_all() == [(True, False), (True, False), None]


def be_aborted(rank: Rank) -> None:
    """Begin what cannot end: the source does not come, or sends less than is expected."""
    communicator = rank.join(connected=False)
    generation = 0
    while (moment := rank.hear()) != "end":
        generation += 1
        links = communicator.open_pairs(generation, rank.store, LINK_UP_S)
        if moment == "before":
            communicator.abort("the test said so")
        if rank.number == SOURCE:
            begin(links, DESTINATION, lambda links: send_less(rank, links)).result()
            continue
        done = begin(links, SOURCE, receive)
        if moment != "before":
            rank.hear()
            assert not done.done()
            communicator.abort("the test said so")
        rank.say((moment, outcome(done)))


def test_an_abort_ends_it_at_any_moment(ranks: Ranks) -> None:
    """Before it has begun, while the peer sends nothing more, and while the peer has not come."""
    ranks.start_all(2, be_aborted)
    ranks.say("while it receives")
    assert ranks.hear(SOURCE) == "sent"
    ranks.say("now", DESTINATION)
    assert ranks.hear(DESTINATION) == ("while it receives", "CommunicatorAborted")
    for moment in ("before", "while it waits for the peer"):
        ranks.say(moment, DESTINATION)
        if moment != "before":
            ranks.say("now", DESTINATION)
        assert ranks.hear(DESTINATION) == (moment, "CommunicatorAborted")
    ranks.say("end")
    ranks.say("end", SOURCE)


def lose_the_peer(rank: Rank) -> None:
    communicator = rank.join(connected=False)
    links = communicator.open_pairs(1, rank.store, LINK_UP_S)
    if rank.number == SOURCE:
        begin(links, DESTINATION, lambda links: send_less(rank, links)).result()
        return
    rank.say(outcome(begin(links, SOURCE, receive)))


def test_a_peer_that_dies_in_the_middle_is_a_failed_link(ranks: Ranks) -> None:
    ranks.start_all(2, lose_the_peer)
    assert ranks.hear(SOURCE) == "sent"
    ranks.signal(SOURCE, signal.SIGKILL)
    assert ranks.hear(DESTINATION) == CommunicatorFailed.__name__


def be_knocked_at(rank: Rank) -> None:
    communicator = rank.join(connected=False)
    links = communicator.open_pairs(1, rank.store, LINK_UP_S)
    if rank.number == SOURCE:
        rank.hear()
        outcome(begin(links, DESTINATION, send))
        return

    # Its peers' addresses are there only when the source has come: it listens before.
    done = begin(links, SOURCE, receive)
    while links._neighbours is None:
        time.sleep(0.001)
    listener = links._neighbours.address.listener
    rank.say((listener.host, listener.port))
    rank.say(outcome(done))


def test_strangers_at_the_port_are_not_taken_for_the_peer(ranks: Ranks) -> None:
    """One says something wrong, one says nothing."""
    ranks.start_all(2, be_knocked_at)
    place = ranks.hear(DESTINATION)
    with socket.create_connection(place) as wrong, socket.create_connection(place):
        wrong.sendall(b"\0" * 24 + b"this is no state")
        ranks.say("come", SOURCE)
        assert ranks.hear(DESTINATION) == "True"


def leave_nothing(rank: Rank) -> None:
    communicator = rank.join(1)
    counts = [_settled()]
    for generation in range(2, CYCLES + 2):
        if generation % 3 == 1 and rank.number == SOURCE:
            links = communicator.open_pairs(generation, rank.store, LINK_UP_S)
            done = begin(links, DESTINATION, lambda links: send(links, 2))
        else:
            links, done = begin_early(rank, communicator, generation)
        if generation % 3 == 0:
            links.abort("the test said so")
        outcome(done)
        del done
        rank.say("over")
        rank.hear()
        counts.append(_settled())
    rank.say(counts)


def _settled() -> tuple[int, int]:
    """Return how many files and Python threads are open, once no thread of a pair is."""
    deadline = time.monotonic() + SETTLED_S
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()  # what is caught here refers to its frames, and they to the connection to the store
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_no_socket_and_no_thread_is_left_behind(ranks: Ranks) -> None:
    """After transfers that ended well, that one side gave up, and that both did."""
    ranks.start_all(2, leave_nothing)
    for _ in range(CYCLES):
        assert ranks.hear_all() == ["over"] * 2
        ranks.say("go on")
    for counts in ranks.hear_all():
        assert len(set(counts)) == 1, counts


def find_no_store(rank: Rank) -> None:
    communicator = rank.join(connected=False)
    nowhere = type(rank.store)("127.0.0.1", 1, "of this test")
    links = communicator.open_pairs(1, nowhere, 0.5)
    rank.say(outcome(begin(links, DESTINATION, send)))


def test_a_store_that_cannot_be_reached_is_a_failed_link_up(ranks: Ranks) -> None:
    ranks.start(SOURCE, 2, find_no_store)
    assert ranks.hear(SOURCE) == LinkUpFailed.__name__
