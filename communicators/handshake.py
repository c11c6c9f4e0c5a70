"""How the members of a generation authenticate to each other, and what they say before they connect.

Any process that can reach a rendezvous store or a listening port can write to it. The members share a secret, which
came over the controller's authenticated connection: with it they sign what they leave in the store, and prove their
rank when they connect. What a member says is decoded into bounded types all the same, because what follows from it is
a connection to an address, and code that trusts it.
"""

import hashlib
import hmac
import ipaddress
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from ..protocol.decoders import json_decoder
from ..protocol.types import Rendezvous

T = TypeVar("T")

MAX_GROUPS = 100_000
MAX_MESSAGE_BYTES = 1 << 24
NONCE_BYTES = 16
TAG_BYTES = 16

Host = Annotated[str, msgspec.Meta(min_length=2, max_length=64)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
GroupNames = Annotated[tuple[GroupName, ...], msgspec.Meta(max_length=MAX_GROUPS)]
Pairs = Annotated[tuple[tuple[GroupName, Annotated[int, msgspec.Meta(ge=0)]], ...], msgspec.Meta(max_length=MAX_GROUPS)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]

HANDSHAKE = struct.Struct(f"<{TAG_BYTES}sq")  # the tag, the rank that connects
HANDSHAKE_S = 1.0  # to receive the whole of it; a member sends it at once
MAX_PENDING = 64  # connections without a handshake; the oldest is closed first
_LEAST_S = 0.001
_STORE, _HANDSHAKE = b"store", b"greeting"  # a tag made for one purpose does not verify for another


class Authenticator:
    """Signs and verifies with the secret of one generation. A tag of another generation does not verify."""

    def __init__(self, rendezvous: Rendezvous, generation: int) -> None:
        secret = rendezvous.secret.encode(errors="surrogatepass")
        self._key = hashlib.blake2b(b"midstep/%d/" % generation + secret).digest()

    def hashed_key(self, key: str) -> str:
        """Return the key in the store under which members find `key`. Only they can compute it."""
        return self._tag(_STORE, key.encode()).hex()

    def sign(self, key: str, value: bytes) -> bytes:
        """Return what to store as the value of `key`: an authentication tag, then `value`."""
        return self._tag(_STORE, key.encode(), value) + value

    def verify(self, key: str, signed: bytes) -> bytes | None:
        """Return the value that a member has signed for `key`; None if no member signed these bytes."""
        tag, value = signed[:TAG_BYTES], signed[TAG_BYTES:]
        return value if hmac.compare_digest(tag, self._tag(_STORE, key.encode(), value)) else None

    def handshake_tag(self, nonce: bytes, rank: int) -> bytes:
        """Return the proof of `rank` for the member that has generated `nonce`."""
        return self._tag(_HANDSHAKE, nonce, b"%d" % rank)

    def verify_handshake(self, tag: bytes, nonce: bytes, rank: int) -> bool:
        """Return whether `tag` is that proof."""
        return hmac.compare_digest(tag, self.handshake_tag(nonce, rank))

    def _tag(self, purpose: bytes, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._key, person=purpose, digest_size=TAG_BYTES)
        for part in parts:
            digest.update(b"%d:" % len(part))
            digest.update(part)
        return digest.digest()


class Listener(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The address of a listening socket. The host is an IP address: looking up a name would take time."""

    host: Host
    port: Port

    def __post_init__(self) -> None:
        """Raise ValueError for a host that is no IP address."""
        ipaddress.ip_address(self.host)


class NeighbourAddress(NamedTuple):
    """Where a rank listens for its neighbours. `nonce` is its own, so that no handshake can be replayed."""

    listener: Listener
    nonce: Nonce


class GlooMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry that each rank publishes before gloo connects them."""

    listener: Listener
    groups: GroupNames
    neighbours: NeighbourAddress
    pairs: bool = False  # it has opened pair links, or has nothing to move over them


class PairMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry that a rank publishes for its partners in pairs."""

    neighbours: NeighbourAddress


class TcpMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry that each rank publishes before the sockets of the communicator `tcp` are connected."""

    neighbours: NeighbourAddress


class DeviceMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message that each rank publishes before its device's communicators are resumed or rebuilt."""

    groups: GroupNames
    linked: Annotated[int, msgspec.Meta(ge=-1)]  # the generation in which all its communicators were last up, or -1
    used: GroupNames = ()  # those of its groups that have been used, and have to come up before the step
    pairs: Pairs = ()  # groups, and places in them, to which it has sent or from which it has received


def encode(message: Any) -> bytes:
    """Return a message as JSON bytes."""
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Return the message in `data`. Raises ValueError when it is not one of this kind, or too large."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return json_decoder(kind).decode(data)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"{len(data)} bytes that nest too deeply, or want too much memory") from error


class _Pending:
    """A connection whose handshake is not complete."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.received = bytearray()


class HandshakeListener:
    """Accepts connections at `listener` until one authenticates as a rank. Used by one thread.

    All connections without a handshake are read at once, each for a short while and only so many of them: a member
    does not wait for strangers.
    """

    def __init__(self, listener: socket.socket, authenticator: Authenticator, nonce: bytes) -> None:
        """`nonce`: what a handshake must prove to have read. The caller closes the listener."""
        self._listener = listener
        self._authenticator = authenticator
        self._nonce = nonce
        self._pending: list[_Pending] = []  # the oldest first
        self.rejected = 0

    def accept(self, deadline: float, expected: Callable[[int], bool]) -> tuple[int, socket.socket]:
        """Return the next rank that authenticates and is `expected`, with its connection.

        Raises TimeoutError at the deadline, other OSErrors when the listener is shut down.
        """
        self._listener.setblocking(False)
        while True:
            found = self._readable(deadline)
            for pending in [each for each in self._pending if each.connection in found]:
                rank = self._receive(pending)
                if rank is not None and expected(rank):
                    self._pending.remove(pending)
                    return rank, pending.connection
                if rank is not None:
                    self._reject(pending)
            now = time.monotonic()
            for late in [each for each in self._pending if each.deadline <= now]:
                self._reject(late)
            if self._listener in found:
                self._accept_connection()

    def close(self) -> None:
        """Close the connections without a handshake. Idempotent."""
        for pending in self._pending:
            pending.connection.close()
        self._pending.clear()

    def _readable(self, deadline: float) -> set[socket.socket]:
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError("no other rank has connected")
        until = min([deadline, *(pending.deadline for pending in self._pending)])
        with selectors.DefaultSelector() as selector:
            for each in (self._listener, *(pending.connection for pending in self._pending)):
                selector.register(each, selectors.EVENT_READ)
            ready = selector.select(max(_LEAST_S, until - now))
        return {key.fileobj for key, _ in ready if isinstance(key.fileobj, socket.socket)}

    def _accept_connection(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it is closed already
            return
        connection.setblocking(False)
        self._pending.append(_Pending(connection, time.monotonic() + HANDSHAKE_S))
        if len(self._pending) > MAX_PENDING:
            self._reject(self._pending[0])

    def _receive(self, pending: _Pending) -> int | None:
        """Read on; return the rank once it is proven, else None. Close the connection if it cannot be a member's."""
        try:
            received = pending.connection.recv(HANDSHAKE.size - len(pending.received))
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        pending.received += received
        if not received:
            self._reject(pending)
        if not received or len(pending.received) < HANDSHAKE.size:
            return None
        tag, rank = HANDSHAKE.unpack(pending.received)
        if self._authenticator.verify_handshake(tag, self._nonce, rank):
            return int(rank)
        self._reject(pending)
        return None

    def _reject(self, pending: _Pending) -> None:
        self.rejected += 1
        self._pending.remove(pending)
        pending.connection.close()
