"""Entries of ranks for each other in the store, and their handshakes

Good values and good handshakes are changed by chance, from a seed.
"""

import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore

from midstep.communicators import handshake
from midstep.communicators.handshake import HANDSHAKE, Authenticator, HandshakeListener
from midstep.communicators.rendezvous import AuthenticatedStore
from midstep.protocol.errors import LinkUpFailed
from midstep.protocol.types import Rendezvous

from .attack import attack
from .fuzzing import CASES, LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)

STORE = Rendezvous("127.0.0.1", 29400, "secret")
NONCE = bytes(range(16))
HERE = handshake.Listener("10.0.0.7", 41000)
GOOD: tuple[Any, ...] = (
    handshake.GlooMember(
        HERE, ("4x0011223344556677.0", "2x8899aabbccddeeff.1"), handshake.NeighbourAddress(HERE, NONCE)
    ),
    handshake.GlooMember(
        handshake.Listener("fe80::1%eth0", 1), (), handshake.NeighbourAddress(handshake.Listener("::1", 65535), NONCE)
    ),
    handshake.DeviceMember(("4x0011223344556677.0",), -1),
    HERE,
    None,
)
WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    1 << 80,
    1e300,
    "",
    "x" * 10_000,
    "10.0.0.7.example.com",
    [],
    [[]] * 100,
    {},
    {"host": 1},
)


def changed(chance: random.Random, good: bytes) -> bytes:
    """Return good bytes with something done to them."""
    data = bytearray(good)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0 if place < len(data):
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = chance.randbytes(chance.choice((1, 4, 100)))
            case 3:
                start = chance.randrange(len(data) + 1)
                data[place:place] = data[start : start + chance.randrange(50)]
            case 4:
                data[place:place] = chance.choice((b"[", b"{", b'"', b"9")) * chance.choice((1, 50, 5000))
            case _:
                data[place : place + 1] = chance.choice((b"\xff", b"\0", b"-", b"1e999", b"null"))
    return bytes(data)


def of_wrong_type(chance: random.Random, good: Any) -> bytes:
    """Return a good message in which one value is of another type, or too large."""
    message = msgspec.to_builtins(good)
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        if isinstance(value, tuple):
            return
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(inner, dict | list):
                visit(inner)

    message = msgspec.json.decode(msgspec.json.encode(message))
    if not isinstance(message, dict | list):
        return msgspec.json.encode(chance.choice(WRONG))
    visit(message)
    holder, key = chance.choice(places)
    holder[key] = chance.choice(WRONG)
    return msgspec.json.encode(message)


@attack(
    "changes what a member has left in the store, in any bit, length or type",
    holds="it is refused as no member's, and the next good value is taken",
    reads="which store, which key, and that somebody else writes there",
)
def test_no_changed_value_passes_for_a_members() -> None:
    """Nor what another member, another key or another generation has signed."""
    chance = random.Random(4711)
    inner = HashStore()
    authenticator = Authenticator(STORE, 3)
    store = AuthenticatedStore(inner, STORE, authenticator, "world")
    elsewhere = [
        Authenticator(STORE, 4).sign("world/member/0", b"null"),
        Authenticator(Rendezvous("127.0.0.1", 29400, "another"), 3).sign("world/member/0", b"null"),
        authenticator.sign("world/member/1", b"null"),
        authenticator.sign("other/member/0", b"null"),
        authenticator.handshake_tag(b"", 0) + b"null",
    ]
    for number in range(CASES):
        good = handshake.encode(chance.choice(GOOD))
        sealed = authenticator.sign("world/member/0", good)
        foreign = chance.choice(elsewhere) if number % 10 == 0 else changed(chance, sealed)
        raw: Any = inner
        raw.set(authenticator.hashed_key("world/member/0"), foreign)
        if foreign != sealed:
            with pytest.raises(LinkUpFailed, match=r"127\.0\.0\.1:29400.*world/member/0"):
                store.get("member/0")
        store.set("member/0", good)
        assert store.get("member/0") == good


@attack(
    "leaves a signed message that makes no sense",
    holds="nothing but hosts that are addresses, ports and names of their kind is believed",
    reads="which store, which key, and what is wrong with the message",
)
def test_a_message_is_of_its_kind_or_refused() -> None:
    """With one error of the decoder's, whatever is wrong; and in bounded time, however deep or large it is."""
    chance = random.Random(4712)
    began_s = time.monotonic()
    for number in range(CASES):
        good = chance.choice(GOOD)
        data = of_wrong_type(chance, good) if number % 2 else changed(chance, handshake.encode(good))
        with suppress(ValueError):
            message = handshake.decode(data, type(good))
            assert type(message) is type(good)
            assert handshake.decode(handshake.encode(message), type(good)) == message
        assert handshake.decode(handshake.encode(good), type(good)) == good
    assert time.monotonic() - began_s < 60.0 + CASES * 0.01
    for data in (b"[" * 10_000_000, b"[" * (handshake.MAX_MESSAGE_BYTES + 1), b'{"groups":' + b"[" * 1_000_000):
        with pytest.raises(ValueError, match=r"."):
            handshake.decode(data, handshake.GlooMember)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as made:
        yield made


@attack(
    "connects to a rank with a handshake that is changed in any bit or length",
    holds="it is turned away, and the neighbour that comes next is let in",
)
def test_no_changed_handshake_makes_a_neighbour(listener: socket.socket) -> None:
    """Strangers may come before it or at the same time, send too little, too much, or hang up."""
    chance = random.Random(4713)
    authenticator = Authenticator(STORE, 3)
    handshakes = HandshakeListener(listener, authenticator, NONCE)
    good = HANDSHAKE.pack(authenticator.handshake_tag(NONCE, 1), 1)
    foreign = 0
    for _ in range(CASES):
        strangers = []
        for _ in range(chance.choice((0, 1, 1, 3))):
            hello = changed(chance, good)
            if hello[: HANDSHAKE.size] == good:  # the right handshake, and then something
                continue
            strangers.append(socket.create_connection(listener.getsockname()))
            strangers[-1].send(hello)
            if chance.random() < 0.7:
                strangers[-1].shutdown(socket.SHUT_WR)
            foreign += 1
        with socket.create_connection(listener.getsockname()) as neighbour:
            neighbour.sendall(good)
            rank, connection = handshakes.accept(time.monotonic() + 30.0, lambda rank: rank == 1)
            assert rank == 1
            assert connection.getpeername() == neighbour.getsockname()
            connection.close()
        for stranger in strangers:
            stranger.close()
    handshakes.close()
    assert foreign >= CASES / 2
