"""Copies in host memory on a second node: handed over beside the training, kept there, and brought back from there."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from midstep.communicators import copy_links
from midstep.processor import guest_copies
from midstep.processor.host_copies import HostCopies
from midstep.protocol.errors import CommunicatorFailed, HostCopyError
from midstep.protocol.host_copies import create_copy_files, read_header
from midstep.protocol.messages import Rejoin
from midstep.protocol.types import (
    JobSettings,
    Rendezvous,
    RepairPart,
    RestoreSource,
    ShardTransfer,
    StepReport,
)

from .test_host_copies import Clock, Held, flip

PATIENCE_S = 20.0
GUEST, KEEPER = 0, 1
Line = queue.Queue[bytes]


class Links:
    """What carries a transfer between two ranks."""

    def __init__(self, lines: dict[tuple[int, int], Line], rank: int) -> None:
        self.lines, self.rank = lines, rank

    def isend(self, tensor: Any, rank: int) -> Any:
        self.lines[self.rank, rank].put(tensor.numpy().tobytes())
        return SimpleNamespace(wait=lambda: True)

    def irecv(self, tensor: Any, rank: int) -> Any:
        def wait() -> None:
            tensor.view(torch.uint8).numpy()[:] = np.frombuffer(self.lines[rank, self.rank].get(timeout=5), np.uint8)

        return SimpleNamespace(wait=wait)


class Side:
    """A process of one rank, on a node of its own."""

    def __init__(self, rank: int, world: "World", fds: tuple[int, ...] | None = None, **settings: Any) -> None:
        self.fds = create_copy_files(rank, 2) if fds is None else fds
        self.framework, self.rank, self.world = Held(), rank, world
        self.notes: list[str] = []
        runtime: Any = SimpleNamespace(
            rank=rank,
            world_size=2,
            ranks_per_node=1,
            generation=1,
            host_copy_fds=self.fds,
            settings=JobSettings(host_copies=True, host_copy_every_steps=1, host_copy_nodes=2, **settings),
            step_clock=Clock(),
            debug_log=SimpleNamespace(note=lambda text, error=None: self.notes.append(f"{text}: {error}")),
            injection_points=SimpleNamespace(reached=lambda *_: None),
            local_states=SimpleNamespace(read=lambda rank, step: b"local state of %d at %d" % (rank, step)),
            communicator=Links(world.lines, rank),
        )
        self.copies = HostCopies(runtime, self.framework)  # type: ignore[arg-type]

    def resume(self, generation: int = 1, common: int = 0, *, paired: bool = True) -> None:
        """Go on with a new plan."""
        peer = 1 - self.rank
        part = RepairPart(
            common,
            RestoreSource.REPLICA,
            host_copy=common,
            copy_holder=peer if paired else None,
            copy_guest=peer if paired else None,
        )
        self.copies.resumed(Rejoin(self.rank, generation, self.world.store, connected=True, part=part))

    def step(self, step: int) -> bool:
        """Do a step, with a copy if this rank is for one; return whether it is."""
        agrees = self.copies.agrees(step, 0.1)
        self.copies.agreed(by_all=agrees)
        self.framework.change()
        self.copies.take(step)
        return agrees

    def kept(self) -> list[tuple[int, int]]:
        """Return the copies of other ranks that lie here, by their headers."""
        headers = [read_header(fd) for fd in self.fds[2:]]
        return sorted((each.rank, each.step) for each in headers if each is not None)

    def report(self) -> StepReport:
        return self.copies.reported(StepReport(0, ready=False, clean=True))


class World:
    """Two ranks, and their store."""

    def __init__(self) -> None:
        self.master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = Rendezvous("127.0.0.1", self.master.port, "a secret")
        self.lines: dict[tuple[int, int], Line] = {(0, 1): queue.Queue(), (1, 0): queue.Queue()}
        self.sides: list[Side] = []

    def side(self, rank: int, **how: Any) -> Side:
        self.sides.append(Side(rank, self, **how))
        return self.sides[-1]

    def close(self) -> None:
        for fds in {side.fds for side in self.sides}:
            for fd in fds:
                os.close(fd)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for side in made.sides:
        side.copies.settle()
        side.report()
    made.close()


def until(holds: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pair(world: World, **settings: Any) -> tuple[Side, Side]:
    """Return a guest and its keeper, which train."""
    guest, keeper = world.side(GUEST), world.side(KEEPER, **settings)
    for side in (guest, keeper):
        side.resume()
    return guest, keeper


def train(guest: Side, steps: range) -> None:
    """Do steps, each with a copy, as soon as the one before it is on both nodes."""
    for step in steps:
        until(lambda step=step: guest.step(step))  # type: ignore[misc]


def moved(guest: Side, keeper: Side, step: int) -> int:
    """Bring a copy back from the keeper; return the bytes that came to the guest."""
    (size,) = [each.size_bytes for each in keeper.report().guest_copies if each.step == step]
    transfer = ShardTransfer("host copy", 0, size, KEEPER, GUEST)
    part = RepairPart(step, RestoreSource.HOST_COPY, copy_transfers=(transfer,))
    sending = threading.Thread(target=lambda: keeper.copies.bring(part))
    sending.start()
    try:
        return guest.copies.bring(part)
    finally:
        sending.join()


def test_a_copy_is_on_two_nodes_before_the_next_one_is_taken(world: World) -> None:
    """The last two are kept, as at home."""
    guest, keeper = pair(world)
    train(guest, range(1, 6))
    until(lambda: keeper.kept() == [(GUEST, 4), (GUEST, 5)])
    report = guest.report()
    assert report.host_copies == (4, 5)
    assert [(each.rank, each.step) for each in keeper.report().guest_copies] == [(GUEST, 4), (GUEST, 5)]


def test_nobody_is_for_a_copy_while_the_last_one_is_on_its_way_and_training_does_not_wait(world: World) -> None:
    """The keeper does not listen yet."""
    guest = world.side(GUEST)
    guest.resume()
    assert guest.step(1)
    began_s = time.monotonic()
    assert not any(guest.step(step) for step in range(2, 30))
    assert time.monotonic() - began_s < copy_links.LIMIT_S / 2
    keeper = world.side(KEEPER)
    keeper.resume()
    until(lambda: guest.step(30))
    until(lambda: keeper.kept() == [(GUEST, 1), (GUEST, 30)])


def test_a_rank_on_a_new_node_gets_its_copy_back(world: World) -> None:
    """With the rank-local state, and it goes on from there; also where the keeper has another process by then."""
    guest, keeper = pair(world)
    train(guest, range(1, 4))
    until(lambda: (GUEST, 3) in keeper.kept())
    guest.copies.settle()
    saved = guest.framework.content()
    keeper.report()
    newcomer, after = world.side(GUEST), world.side(KEEPER, fds=keeper.fds)
    assert newcomer.report().host_copies == ()
    assert moved(newcomer, after, 3) > 8000
    assert newcomer.copies.load(3) == b"local state of 0 at 3"
    assert newcomer.framework.content() == saved
    for side in (newcomer, after):
        side.resume(2, 3)
    assert after.kept() == [(GUEST, 3)]
    train(newcomer, range(4, 5))
    until(lambda: after.kept() == [(GUEST, 3), (GUEST, 4)])


def test_a_damaged_copy_is_not_sent_and_is_then_no_copy_any_more(world: World) -> None:
    """The next attempt takes the one before it."""
    guest, keeper = pair(world)
    train(guest, range(1, 3))
    until(lambda: (GUEST, 2) in keeper.kept())
    (fd,) = [fd for fd in keeper.fds[2:] if (read_header(fd) or [0] * 3)[2] == 2]
    flip(fd, 1200)
    transfer = ShardTransfer("host copy", 0, 1, KEEPER, GUEST)
    with pytest.raises(HostCopyError, match="for rank 0: the copy of step 2 is damaged"):
        keeper.copies.bring(RepairPart(2, RestoreSource.HOST_COPY, copy_transfers=(transfer,)))
    assert keeper.kept() == [(GUEST, 1)]


def test_a_keeper_without_room_refuses_and_copies_go_on_at_home(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Its own bound counts, for all files of its node. It is said once, and what it has stays."""
    guest, keeper = pair(world, host_copy_bytes=4096)
    with caplog.at_level(logging.WARNING, "midstep"):
        train(guest, range(1, 6))
    (warning,) = caplog.messages
    assert "copies of rank 0 are on its own node only: rank 1 does not keep them" in warning
    assert "allowed for each of the 4 copies" in warning
    assert keeper.kept() == []
    assert all(os.fstat(fd).st_size == 0 for fd in keeper.fds)
    assert guest.report().host_copies == (4, 5)


def test_a_keeper_that_does_not_answer_is_given_up_for_a_while(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has not waited for it."""
    monkeypatch.setattr(copy_links, "LIMIT_S", 0.2)
    guest = world.side(GUEST)
    guest.resume()
    with caplog.at_level(logging.WARNING, "midstep"):
        train(guest, range(1, 5))
    (warning,) = caplog.messages
    assert "rank 1 does not keep them: rank 1 has not said within 0.2 s where it takes copies" in warning
    assert guest.report().host_copies == (3, 4)


def test_a_keeper_that_was_given_up_is_tried_again(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many copies; that copies are there again is said as well."""
    monkeypatch.setattr(copy_links, "LIMIT_S", 0.2)
    monkeypatch.setattr(guest_copies, "AGAIN", 3)
    guest, keeper = world.side(GUEST), world.side(KEEPER)
    guest.resume()
    with caplog.at_level(logging.INFO, "midstep"):
        train(guest, range(1, 3))
        monkeypatch.undo()
        keeper.resume()
        train(guest, range(3, 8))
    # While the last copy arrives it takes the place of the one before the last but one.
    until(lambda: keeper.kept() == [(GUEST, 5), (GUEST, 6)] or (GUEST, 7) in keeper.kept())
    assert [message.split(" of rank 0 are ")[1][:6] for message in caplog.messages] == ["on its", "with r"]


def test_a_rank_without_a_place_on_another_node_says_so_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Its copies are at home."""
    guest = world.side(GUEST)
    guest.resume(paired=False)
    with caplog.at_level(logging.WARNING, "midstep"):
        train(guest, range(1, 4))
    (warning,) = caplog.messages
    assert "no rank of another node is free to keep them" in warning


def test_after_the_report_nothing_is_taken_in(world: World) -> None:
    """What has been reported is what is there when the plan comes."""
    guest, keeper = pair(world)
    train(guest, range(1, 4))
    until(lambda: (GUEST, 3) in keeper.kept())
    before = keeper.report().guest_copies
    guest.step(4)
    time.sleep(0.1)
    assert keeper.report().guest_copies == before


def test_strangers_and_copies_of_others_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects must know the generation's secret, and sends its own copies only."""
    monkeypatch.setattr(copy_links, "LIMIT_S", 0.2)
    keeper = world.side(KEEPER)
    keeper.resume()
    stranger = copy_links.CopyLinks(GUEST, 1, Rendezvous("127.0.0.1", world.store.port, "another secret"), 5.0)
    with pytest.raises(CommunicatorFailed, match="has not said within"):
        stranger.connect(KEEPER)
    stranger.close()
    member = copy_links.CopyLinks(GUEST, 1, world.store, 5.0)
    connection = member.connect(KEEPER)

    connection.send(b"\xff" * 56)
    with pytest.raises(CommunicatorFailed, match="receiving a copy failed"):
        connection.receive(1)
    member.close()
    assert keeper.kept() == []
