"""The sockets of the commit barrier

Any process that reaches a rank's port can connect to it.
"""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from midstep.communicators.neighbours import Neighbours
from midstep.protocol.errors import CommunicatorFailed

from ..unit.test_neighbours import World
from .attack import attack

IDLE = 12
FLOOD = 100
SHORT_S = 6.0  # less than a second for each idle stranger


@pytest.fixture
def world() -> Iterator[World]:
    made = World(2)
    yield made
    made.close()


def connect(neighbours: Neighbours) -> socket.socket:
    listener = neighbours.address.listener
    return socket.create_connection((listener.host, listener.port), timeout=5.0)


def link_up(world: World, limit_s: float) -> None:
    world.introduce()
    world.all(lambda _, neighbours: neighbours.connect(time.monotonic() + limit_s))
    world.all(lambda _, neighbours: neighbours.barrier())


@attack("connects and says nothing, many times over", holds="a link-up takes no longer for it")
def test_idle_strangers_take_no_time(world: World) -> None:
    """They are listened to all at once."""
    strangers = [connect(neighbours) for neighbours in world.ranks for _ in range(IDLE)]
    began_s = time.monotonic()
    link_up(world, SHORT_S)
    assert time.monotonic() - began_s < SHORT_S
    for stranger in strangers:
        stranger.close()


@attack(
    "connects more often than connections are kept, and sends a handshake byte by byte",
    holds="the true neighbour is let in",
)
def test_a_flood_of_strangers_keeps_no_neighbour_out(world: World) -> None:
    """The oldest of them give way."""
    strangers = [connect(world.ranks[0]) for _ in range(FLOOD)]
    for stranger in strangers:
        with suppress(OSError):
            stranger.send(b"\x01")
    link_up(world, 30.0)
    for stranger in strangers:
        stranger.close()


@attack(
    "reads in the store what ranks tell each other, and connects in the name of a neighbour",
    holds="without the generation's secret it is turned away, and the neighbour takes its place",
)
def test_what_lies_in_the_store_does_not_make_a_neighbour(world: World) -> None:
    """All that others may see of the handshake is what it is made of."""
    address = world.ranks[0].address
    strangers = []
    for proof in (address.nonce, bytes(16), address.nonce[::-1]):
        strangers.append(connect(world.ranks[0]))
        strangers[-1].sendall(struct.pack("<16sq", proof, 1))
    link_up(world, 30.0)
    for stranger in strangers:
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()


@attack(
    "shows a handshake to a rank that was meant for another one, or that was used before",
    holds="it is good for one connection to one rank only",
)
def test_a_handshake_cannot_be_used_twice(world: World) -> None:
    """Neither at another listener, nor at the same one for a second connection."""
    link_up(world, 30.0)
    nonce = world.ranks[1].address.nonce
    handshake = struct.pack("<16sq", world.ranks[1]._authenticator.handshake_tag(nonce, 0), 0)
    for neighbours in world.ranks:
        with connect(neighbours) as stranger:
            stranger.sendall(handshake)
            taken = world.start(neighbours.rank, lambda _, each: each.connection_from(7, time.monotonic() + 0.3))
            assert stranger.recv(1) == b""
            with pytest.raises(CommunicatorFailed):
                taken.result(30.0)
