"""The ranks' own sockets for the end of a step: what a swap hands over, what a barrier holds back, what ends a wait."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from midstep.communicators.base import Met
from midstep.communicators.generation_scope import GenerationScope
from midstep.communicators.handshake import Authenticator
from midstep.communicators.neighbours import Neighbours
from midstep.protocol.errors import CommunicatorAborted, CommunicatorFailed
from midstep.protocol.types import Rendezvous

AUTHENTICATOR = Authenticator(Rendezvous("127.0.0.1", 1, "secret"), 1)
LONG_S = 20.0
BLOCKED_S = 0.1


class World:
    """Ranks in threads of this process."""

    def __init__(self, size: int, limit_s: float = LONG_S) -> None:
        self.ranks: list[Neighbours] = []
        self.scopes: list[GenerationScope] = []
        for rank in range(size):
            self.scopes.append(GenerationScope(partial(self._cut, rank)))
            self.ranks.append(
                Neighbours(
                    rank, size, "127.0.0.1", limit_s=limit_s, scope=self.scopes[rank], authenticator=AUTHENTICATOR
                )
            )
        self._threads = ThreadPoolExecutor(size)

    def _cut(self, rank: int) -> None:
        self.ranks[rank].cut()

    def introduce(self) -> None:
        addresses = [neighbours.address for neighbours in self.ranks]
        for neighbours in self.ranks:
            neighbours.expect(addresses)

    def start(self, rank: int, call: Callable[[int, Neighbours], Any]) -> "Future[Any]":
        return self._threads.submit(call, rank, self.ranks[rank])

    def all(self, call: Callable[[int, Neighbours], Any]) -> list[Any]:
        return [answer.result(LONG_S) for answer in [self.start(rank, call) for rank in range(len(self.ranks))]]

    def connect(self) -> None:
        self.introduce()
        self.all(lambda _, neighbours: neighbours.connect(time.monotonic() + LONG_S))

    def close(self) -> None:
        for neighbours in self.ranks:
            neighbours.close()
        self._threads.shutdown()


@pytest.fixture
def made() -> Iterator[list[World]]:
    worlds: list[World] = []
    yield worlds
    for world in worlds:
        world.close()


@pytest.fixture
def connected(made: list[World]) -> Callable[[int], World]:
    def make(size: int) -> World:
        made.append(World(size))
        made[-1].connect()
        return made[-1]

    return make


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_nobody_leaves_a_barrier_before_the_last_has_entered_it(connected: Callable[[int], World], size: int) -> None:
    world = connected(size)
    for late in range(size):
        left: list[int] = []

        def pass_it(rank: int, neighbours: Neighbours, left: list[int] = left) -> None:
            neighbours.barrier()
            left.append(rank)

        early = [world.start(rank, pass_it) for rank in range(size) if rank != late]
        time.sleep(BLOCKED_S / size)
        assert left == []
        for answer in [*early, world.start(late, pass_it)]:
            answer.result(LONG_S)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_barrier_tells_every_rank_whether_all_agree(connected: Callable[[int], World], size: int) -> None:
    world = connected(size)
    for against in range(size):

        def pass_it(rank: int, neighbours: Neighbours, against: int = against) -> bool:
            return neighbours.barrier(agrees=rank != against).agrees

        assert world.all(pass_it) == [False] * size
    assert world.all(lambda _, each: each.barrier(agrees=True).agrees) == [True] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_barrier_tells_every_rank_the_highest_verdict(connected: Callable[[int], World], size: int) -> None:
    world = connected(size)
    for judge in range(size):

        def pass_it(rank: int, neighbours: Neighbours, judge: int = judge) -> Met:
            return neighbours.barrier(agrees=True, verdict=7 if rank == judge else 3)

        assert world.all(pass_it) == [Met(True, 7)] * size


class Gathered:
    """Ranks that have been heard, and some bytes of each."""

    def __init__(self, rank: int, length: int) -> None:
        self.ranks = {rank}
        self._length = length

    def said(self) -> bytes:
        return bytes(sorted(self.ranks)) + b"." * self._length

    def heard(self, said: bytes) -> None:
        self.ranks |= {*said.rstrip(b".")}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", [0, 500_000])
def test_what_is_gathered_in_a_barrier_comes_to_all_that_gather(
    connected: Callable[[int], World], size: int, length: int
) -> None:
    """However much it is. A rank that gathers nothing is not held up."""
    world = connected(size)
    gathered = [Gathered(rank, length) for rank in range(size)]

    def pass_it(rank: int, neighbours: Neighbours) -> Met:
        return neighbours.barrier(agrees=True, verdict=rank, gathering=gathered[rank])

    assert world.all(pass_it) == [Met(True, size - 1)] * size
    assert [each.ranks for each in gathered] == [{*range(size)}] * size

    def one_does_not(rank: int, neighbours: Neighbours) -> Met:
        return neighbours.barrier(gathering=gathered[rank] if rank else None)

    assert world.all(one_does_not) == [Met(False, 0)] * size


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 10_000, 3_000_000])
def test_a_swap_brings_each_rank_what_its_ward_sent(connected: Callable[[int], World], shift: int, length: int) -> None:
    world = connected(4)

    def swap(rank: int, neighbours: Neighbours) -> bytes:
        own = bytes([rank]) * (length + rank)
        return neighbours.swap(own, (rank + shift) % 4, (rank - shift) % 4)

    for _ in range(2):
        arrived = world.all(swap)
        assert arrived == [bytes([ward]) * (length + ward) for ward in [(rank - shift) % 4 for rank in range(4)]]


def test_swaps_and_barriers_can_follow_each_other_as_long_as_all_ranks_do_the_same(
    connected: Callable[[int], World],
) -> None:
    world = connected(4)

    def steps(rank: int, neighbours: Neighbours) -> list[bytes]:
        seen = []
        for step in range(50):
            seen.append(neighbours.swap(b"%d of %d" % (step, rank), (rank + 2) % 4, (rank + 2) % 4))
            neighbours.barrier()
        return seen

    assert world.all(steps) == [[b"%d of %d" % (step, (rank + 2) % 4) for step in range(50)] for rank in range(4)]


def test_swaps_apart_are_done_by_some_ranks_only(connected: Callable[[int], World]) -> None:
    """Ranks 0 and 2 do two between barriers, 1 and 3 none; a rank that does one where its peer swaps is told so."""
    world = connected(4)

    def steps(rank: int, neighbours: Neighbours) -> list[bytes]:
        seen = []
        for step in range(50):
            for _ in range(0 if rank % 2 else 2):
                own = b"%d of %d" % (step, rank)
                seen.append(neighbours.swap(own, (rank + 2) % 4, (rank + 2) % 4, apart=True))
            neighbours.barrier()
            neighbours.swap(b"all", (rank + 1) % 4, (rank - 1) % 4)
        return seen

    theirs = [[b"%d of %d" % (step, (rank + 2) % 4) for step in range(50) for _ in range(2)] for rank in range(4)]
    assert world.all(steps) == [theirs[0], [], theirs[2], []]
    pair = connected(2)
    answers = [pair.start(rank, lambda r, each: each.swap(b"own", 1 - r, 1 - r, apart=bool(r))) for rank in range(2)]
    assert all("another exchange" in str(answer.exception(LONG_S)) for answer in answers)


def test_ranks_that_are_at_different_exchanges_are_told_so(connected: Callable[[int], World]) -> None:
    world = connected(2)
    answers = [
        world.start(0, lambda _, neighbours: neighbours.barrier()),
        world.start(1, lambda _, neighbours: neighbours.swap(b"own", 0, 0)),
    ]
    failures = [str(answer.exception(LONG_S)) for answer in answers]
    assert any("another exchange" in failure for failure in failures)


def test_the_end_of_one_rank_ends_the_barrier_of_all(connected: Callable[[int], World]) -> None:
    world = connected(8)
    waiting = [world.start(rank, lambda _, neighbours: neighbours.barrier()) for rank in range(7)]
    time.sleep(BLOCKED_S)
    world.ranks[7].close()
    for answer in waiting:
        with pytest.raises(CommunicatorFailed, match="barrier"):
            answer.result(LONG_S)
    assert all(scope.reason is not None for scope in world.scopes[:7])


@pytest.mark.parametrize("kind", ["barrier", "swap", "connect"])
def test_a_cut_from_another_thread_ends_a_wait(made: list[World], kind: str) -> None:
    world = World(2)
    made.append(world)
    world.introduce()
    if kind != "connect":
        world.all(lambda _, neighbours: neighbours.connect(time.monotonic() + LONG_S))

    def wait(_: int, neighbours: Neighbours) -> None:
        if kind == "barrier":
            neighbours.barrier()
        elif kind == "swap":
            neighbours.swap(b"own" * 1_000_000, 1, 1)  # more than fits on the way
        else:
            neighbours.connect(time.monotonic() + LONG_S)

    answer = world.start(0, wait)
    time.sleep(BLOCKED_S)
    assert not answer.done()
    world.scopes[0].end(CommunicatorAborted, "the test said so")
    world.ranks[0].cut()
    with pytest.raises(CommunicatorAborted, match="the test said so"):
        answer.result(LONG_S)


def test_a_rank_that_waits_in_vain_gives_up_at_its_limit(made: list[World]) -> None:
    world = World(2, limit_s=BLOCKED_S)
    made.append(world)
    world.connect()
    with pytest.raises(CommunicatorFailed, match=r"nothing came for 0\.1 s"):
        world.ranks[0].barrier()


def test_who_does_not_know_the_secret_is_turned_away(made: list[World]) -> None:
    world = World(2)
    made.append(world)
    world.introduce()
    strangers = []
    for hello in (b"", b"x" * 24, b"GET / HTTP/1.1\r\n\r\n" * 3):
        listener = world.ranks[0].address.listener
        stranger = socket.create_connection((listener.host, listener.port))
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)
    world.connect()
    world.all(lambda _, neighbours: neighbours.barrier())
    for stranger in strangers:
        stranger.settimeout(LONG_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()


def test_what_is_tried_after_a_cut_fails_at_once(connected: Callable[[int], World]) -> None:
    world = connected(2)
    world.ranks[0].cut()
    with pytest.raises(CommunicatorFailed):
        world.ranks[0].barrier()
    with pytest.raises(CommunicatorFailed):
        world.ranks[0].swap(b"own", 1, 1)
