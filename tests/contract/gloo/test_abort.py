"""An abort and the device's stop, or the death of a peer, end whatever a rank is blocked in."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.contract.makers import Setup
from torch.nn.parallel import DistributedDataParallel

from midstep.protocol.errors import CommunicatorAborted, CommunicatorFailed

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

ON_ALL = pytest.mark.makers("gloo", "fake", "npu")
SOON_S = 2.0
BLOCKED_S = 0.2


def block(op: str, setup: Setup, model: torch.nn.Module) -> None:
    """Do something that cannot end, because no other rank does it; wait for the device, where it does it."""
    communicator = setup.communicator
    if op == "all_reduce":
        dist.all_reduce(torch.ones(1000))
    elif op == "all_reduce of 40 MB":
        dist.all_reduce(torch.ones(10_000_000))
    elif op == "future":
        dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2))
    elif op == "recv":
        dist.recv(torch.ones(1000), 1)
    elif op == "irecv":
        communicator.irecv(torch.ones(1000, device="cpu"), 1).wait()
    elif op == "barrier":
        dist.barrier()
    elif op == "commit barrier":
        communicator.barrier()
    elif op == "swap":
        communicator.swap(b"rank-local state", 1, 1)
    else:
        assert op == "ddp backward"
        model(torch.ones(1, 8)).sum().backward()
    setup.device.finish()


OF_HOSTS = ("irecv", "commit barrier", "swap")
OPS = (
    "all_reduce",
    "all_reduce of 40 MB",
    "future",
    "reduce_scatter",
    "recv",
    *OF_HOSTS,
    "barrier",
    "ddp backward",
)


def be_aborted(rank: Rank) -> None:
    setup = Setup(rank)
    communicator = setup.communicator
    generation = 0
    model = DistributedDataParallel(torch.nn.Linear(8, 4), broadcast_buffers=False)
    # A device links a pair in its first message, from which nothing but its library comes back.
    one = torch.ones(1)  # a stopped device makes none
    dist.send(one, 1) if rank.number == 0 else dist.recv(one, 0)
    while True:
        op = rank.hear()
        if rank.number == 0:
            began: list[float] = []

            def abort(began: list[float] = began) -> None:
                began.append(time.monotonic())
                setup.stop("the test said so")

            timer = threading.Timer(BLOCKED_S, abort)
            timer.start()
            caught: Any = None
            try:
                block(op, setup, model)
            except Exception as error:
                caught = type(error), str(error)
            woken_s = time.monotonic() - began[0] if began else -1.0
            timer.join()
            refused = ""
            try:
                dist.all_reduce(one)
            except CommunicatorAborted as error:
                refused = str(error)
            rank.say((caught, woken_s, communicator.failed, refused))
        generation += 1
        setup.stop("end of round")
        setup.device.clean()
        communicator.reconnect(generation, rank.store, setup.maker.link_up_s)
        model = DistributedDataParallel(torch.nn.Linear(8, 4), broadcast_buffers=False)


@pytest.fixture(scope="module")
def pair(module_ranks: Ranks) -> Ranks:
    module_ranks.start_all(2, be_aborted)
    return module_ranks


@ON_ALL
@pytest.mark.parametrize("op", OPS)
def test_an_abort_from_another_thread_wakes_a_blocked_rank(pair: Ranks, op: str) -> None:
    pair.say(op, 0)
    (kind, text), woken_s, failed, refused = pair.hear(0)
    pair.say("next", 1)
    assert 0 <= woken_s < SOON_S
    words = () if op in OF_HOSTS else pair.maker.stopped_words
    if words or op == "ddp backward":
        assert issubclass(kind, RuntimeError)  # torch carries an error out of the reducer by its text only
    else:
        assert kind is CommunicatorAborted
    assert any(word in text for word in words or ("the test said so",)), text
    assert failed == "the test said so"
    assert "the test said so" in refused


def lose_a_peer(rank: Rank) -> None:
    communicator = rank.join()
    dist.all_reduce(torch.ones(1))
    rank.say("up")
    if rank.number == 3:
        signal.pause()
    try:
        dist.all_reduce(torch.ones(1000))
    except CommunicatorFailed as error:
        rank.say((time.monotonic(), str(error), communicator.failed))
    rank.hear()


def test_the_death_of_a_peer_reaches_every_rank_and_not_only_its_neighbours(ranks: Ranks) -> None:
    ranks.start_all(4, lose_a_peer)
    assert ranks.hear_all() == ["up"] * 4
    time.sleep(BLOCKED_S)
    killed = time.monotonic()
    ranks.signal(3, signal.SIGKILL)
    for seen, text, failed in ranks.hear_all():
        assert seen - killed < SOON_S
        assert "allreduce failed" in text
        assert failed is not None
        assert failed in text


class Diary:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []

    def entered(self, op: str, group: tuple[int, ...] = ()) -> None:
        self.entries.append(("entered", op))

    def left(self, op: str) -> None:
        self.entries.append(("left", op))

    def waited(self, seconds: float) -> None:
        assert seconds >= 0


def be_watched(rank: Rank) -> None:
    communicator = Setup(rank).communicator
    model = DistributedDataParallel(torch.nn.Linear(8, 4), broadcast_buffers=False)
    diary = Diary()
    communicator.watch(diary)
    dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    diary.entries.append(("test", "computes"))
    work.wait()
    communicator.barrier()
    model(torch.ones(1, 8)).sum().backward()
    communicator.watch(None)
    dist.barrier()
    rank.say(diary.entries)
    rank.hear()


@ON_ALL
def test_an_observer_sees_the_collectives_of_the_training_and_nothing_else(ranks: Ranks) -> None:
    ranks.start_all(2, be_watched)
    for entries in ranks.hear_all():
        assert entries == [
            ("entered", "allreduce"),
            ("left", "allreduce"),
            ("entered", "allreduce"),
            ("test", "computes"),
            ("left", "allreduce"),
            ("entered", "allreduce"),  # the reducer's
            ("left", "allreduce"),
        ]
