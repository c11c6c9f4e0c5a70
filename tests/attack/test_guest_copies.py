"""The sockets over which ranks hand their copies in host memory to other nodes

Any process that reaches a keeper's port can connect to it; a member of the generation may send what it likes.
"""

import os
import socket
import time
from collections.abc import Iterator

import pytest

from midstep.communicators.copy_links import CopyLinks
from midstep.protocol.errors import CommunicatorFailed
from midstep.protocol.host_copies import CopyHeader, SentCopy

from ..unit.test_guest_copies import GUEST, KEEPER, Side, World, train, until
from .attack import attack

STRANGERS = 30
ANSWER_BYTES = 10  # the step, and the length of a reason


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for side in made.sides:
        side.report()
    made.close()


def listener_of(keeper: Side) -> socket.socket:
    """Return the socket at which a keeper takes copies, once it does."""
    links = keeper.copies._keeper.links
    assert links is not None

    def found() -> list[socket.socket]:
        return [each for each in tuple(links._sockets) if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]

    until(lambda: bool(found()))
    return found()[0]


def answer_to(world: World, header: CopyHeader, content: bytes = b"") -> bytes:
    """Send a copy as the guest, whatever it is, and return why it is refused."""
    links = CopyLinks(GUEST, 1, world.store, 5.0)
    try:
        connection = links.connect(KEEPER)
        connection.send(SentCopy(header, 1, memoryview(b"")).packed())
        answer = connection.receive(ANSWER_BYTES)
        if not any(answer[8:]) and content:
            connection.send(content)
            answer = connection.receive(ANSWER_BYTES)
        return connection.receive(int.from_bytes(answer[8:], "little"))
    finally:
        links.close()


@attack("connects to a keeper many times over, with half a handshake or a wrong one", holds="the guest's copies get in")
def test_strangers_keep_no_guest_out(world: World) -> None:
    """And nothing of theirs is kept."""
    guest, keeper = world.side(GUEST), world.side(KEEPER)
    keeper.resume()
    host, port = listener_of(keeper).getsockname()[:2]
    strangers = [socket.create_connection((host, port), timeout=5.0) for _ in range(STRANGERS)]
    for number, stranger in enumerate(strangers):
        stranger.send(b"\x01" * (5 if number % 2 else 24))
    guest.resume()
    train(guest, range(1, 3))
    until(lambda: keeper.kept() == [(GUEST, 1), (GUEST, 2)])
    for stranger in strangers:
        stranger.close()


@attack(
    "a member announces a copy that is larger than any memory",
    holds="the keeper refuses it, and takes no memory for it",
    reads="the sizes, in the log of the rank that sends",
)
def test_an_enormous_copy_takes_no_memory(world: World) -> None:
    """Its bound is looked at before anything else."""
    keeper = world.side(KEEPER)
    keeper.resume()
    assert b"are allowed for each" in answer_to(world, CopyHeader(GUEST, 2, 5, 1, 100, 1 << 60))
    assert all(os.fstat(fd).st_size == 0 for fd in keeper.fds)


@attack("a member sends a copy whose bytes are others than its checksum says", holds="it is refused, and is no copy")
def test_a_changed_copy_is_refused(world: World) -> None:
    """The one before it stays."""
    guest, keeper = world.side(GUEST), world.side(KEEPER)
    for side in (guest, keeper):
        side.resume()
    train(guest, range(1, 2))
    until(lambda: keeper.kept() == [(GUEST, 1)])
    guest.report()
    time.sleep(0.1)
    assert b"has arrived changed" in answer_to(world, CopyHeader(GUEST, 2, 5, 1, 10, 90), bytes(100))
    assert keeper.kept() == [(GUEST, 1)]


@attack(
    "a member sends a header with negative numbers, or the copy of another rank",
    holds="the connection is closed, and the next one is taken",
)
def test_a_wrong_header_ends_the_connection(world: World) -> None:
    """Nothing is written."""
    keeper = world.side(KEEPER)
    keeper.resume()
    for header in (
        CopyHeader(GUEST, 2, -5, 1, 10, 10),
        CopyHeader(7, 2, 5, 1, 10, 10),
        CopyHeader(GUEST, 9, 5, 1, 1, 1),
    ):
        with pytest.raises(CommunicatorFailed):
            answer_to(world, header)
    assert b"has arrived changed" in answer_to(world, CopyHeader(GUEST, 2, 5, 1, 10, 90), bytes(100))
    assert keeper.kept() == []
