"""The communicator for arrays in host memory: what its collectives give, and what ends their waits."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import TCPStore

from midstep.communicators.base import HostCollectives
from midstep.communicators.tcp.communicator import TcpCommunicator
from midstep.policies.schema import CommunicatorPolicy
from midstep.protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed
from midstep.protocol.types import Rendezvous

LONG_S = 30.0
SIZE = 3


class Ranks:
    """Communicators of one world in threads of this process."""

    def __init__(self) -> None:
        self._server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = Rendezvous("127.0.0.1", self._server.port, "secret")
        self.all = [TcpCommunicator() for _ in range(SIZE)]
        self._threads = ThreadPoolExecutor(SIZE)
        for rank, each in enumerate(self.all):
            each.init(rank=rank, world_size=SIZE, generation=0, store=None, collective_s=LONG_S, link_up_s=LONG_S)

    def start(self, call: Callable[[int, TcpCommunicator], Any]) -> "list[Future[Any]]":
        return [self._threads.submit(call, rank, each) for rank, each in enumerate(self.all)]

    def run(self, call: Callable[[int, TcpCommunicator], Any]) -> list[Any]:
        return [each.result(LONG_S) for each in self.start(call)]

    def connect(self, generation: int) -> None:
        self.run(lambda _, each: each.reconnect(generation, self.store, LONG_S))

    def close(self) -> None:
        for each in self.all:
            each.close()
        self._threads.shutdown()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def _value(rank: int, size: int) -> Any:
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 3_000_001])
def test_an_allreduce_gives_every_rank_the_same_bits_in_every_generation(ranks: Ranks, size: int) -> None:
    """The order of addition follows from the rank and the place in the array, and from nothing else."""

    def allreduce(rank: int, each: TcpCommunicator) -> bytes:
        array = _value(rank, size)
        each.allreduce(array)
        data: bytes = array.tobytes()
        return data

    results = set()
    for generation in (1, 2):
        ranks.connect(generation)
        results |= set(ranks.run(allreduce))
    assert len(results) == 1
    np.testing.assert_allclose(
        np.frombuffer(results.pop(), np.float32), sum(_value(rank, size) for rank in range(SIZE)), atol=1e-5
    )


def test_a_broadcast_brings_the_array_of_its_source(ranks: Ranks) -> None:
    """Of any size and dtype."""
    ranks.connect(1)

    def broadcast(rank: int, each: TcpCommunicator) -> Any:
        array = np.full(700_000, rank, np.int64)
        each.broadcast(array, 1)
        return set(array.tolist())

    assert ranks.run(broadcast) == [{1}] * SIZE


def test_ranks_that_send_much_to_each_other_at_once_are_not_stuck(ranks: Ranks) -> None:
    """Who waits for a send takes in what comes meanwhile."""
    ranks.connect(1)
    count = 8_000_000

    def exchange(rank: int, each: TcpCommunicator) -> bool:
        peers = [peer for peer in range(SIZE) if peer != rank]
        sends = [each.isend(np.full(count, rank, np.uint8), peer) for peer in peers]
        buffers = {peer: np.empty(count, np.uint8) for peer in peers}
        receives = [each.irecv(buffer, peer) for peer, buffer in buffers.items()]
        for transfer in (*sends, *receives):
            transfer.wait()
        return all((buffer == peer).all() for peer, buffer in buffers.items())

    assert ranks.run(exchange) == [True] * SIZE


def test_what_the_socket_takes_leaves_before_its_sender_waits(ranks: Ranks) -> None:
    ranks.connect(1)
    received = threading.Event()

    def hand_over(rank: int, each: TcpCommunicator) -> None:
        if rank == 0:
            sent = each.isend(np.arange(1000), 1)
            assert received.wait(LONG_S)
            sent.wait()
        elif rank == 1:
            array = np.empty(1000, int)
            each.irecv(array, 0).wait()
            assert array.tolist() == list(range(1000))
            received.set()

    ranks.run(hand_over)


def test_an_abort_ends_a_collective_that_waits_and_the_next_generation_is_good(ranks: Ranks) -> None:
    """Ranks 0 and 1 wait for rank 2, which never comes."""
    ranks.connect(1)

    def wait(rank: int, each: TcpCommunicator) -> str:
        if rank == SIZE - 1:
            return "absent"
        with pytest.raises((CommunicatorAborted, CommunicatorFailed)) as caught:
            each.allreduce(np.ones(10, np.float32))
        return str(caught.value)

    waiting = ranks.start(wait)
    for each in ranks.all:
        each.abort("a peer is gone")
    assert [each.result(LONG_S) for each in waiting][-1] == "absent"
    assert all(each.failed is not None for each in ranks.all)
    ranks.connect(2)
    assert (
        ranks.run(lambda _, each: each.swap(b"blob", (each._rank + 1) % SIZE, (each._rank - 1) % SIZE))
        == [b"blob"] * SIZE
    )


def test_a_rank_that_never_comes_is_named_in_time(ranks: Ranks) -> None:
    """A link-up without all of its ranks fails at its deadline, of which the last tenth is for finding out who."""
    with pytest.raises(LinkUpFailed, match="rank 1 has not come"):
        ranks.all[0].reconnect(1, ranks.store, CommunicatorPolicy().link_up_s)


def test_an_abort_ends_a_link_up(ranks: Ranks) -> None:
    """Long before its deadline."""
    timer = threading.Timer(0.1, ranks.all[0].abort, ("told so",))
    timer.start()
    with pytest.raises(CommunicatorAborted, match="told so"):
        ranks.all[0].reconnect(1, ranks.store, LONG_S)
    timer.join()


def test_before_the_first_reconnect_a_rank_is_alone_with_its_input(ranks: Ranks) -> None:
    """A newcomer builds what it needs while survivors are still stopping."""
    array = np.arange(3.0)
    ranks.all[0].allreduce(array)
    assert isinstance(ranks.all[0], HostCollectives)
    assert array.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CommunicatorFailed, match="not connected yet"):
        ranks.all[0].isend(array, 1)


def test_no_socket_is_left_open(ranks: Ranks) -> None:
    """Of a generation that is over."""
    ranks.connect(1)
    neighbours = ranks.all[0]._neighbours
    assert neighbours is not None
    ranks.connect(2)
    with pytest.raises(OSError, match="Bad file descriptor"):
        neighbours._listener.getsockname()
