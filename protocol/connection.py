"""One client connection of the front and its counterpart at the router: its handshake, its limits, and its place.

The front has to know when a connection is authenticated, and when it asks to be. It follows the ZMTP handshake by the
bytes that it relays, without taking part: greeting and commands are framed in clear text (RFC 23, RFC 26), and what
they hold is libzmq's business alone.

A handshake takes milliseconds, but not when all nodes of a job connect at once. If each newcomer pushed another one
out, none would ever get to its end. So a connection has its time, and while all places are taken by connections that
still have theirs, newcomers wait in the listener's backlog, which the kernel bounds.
"""

import errno
import os
import resource
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import msgspec

from .identities import OPERATOR_PREFIX, is_family

CHUNK_BYTES = 64 * 1024  # of which the C library maps no memory for each read: that took five times as long
OTHER_KEYS = "handshake with the keys of another job"  # or another token: the router cannot read a word of it
_AGAIN = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})
SIGNATURE = 0xFF  # the first byte of every ZMTP greeting
LONGEST_BYTES = 64 * 1024  # of a handshake, in each direction
_GREETING_BYTES = 64
_LONG = 0x02
_SHORT_HEAD, _LONG_HEAD = 2, 9  # flags, then the length in one byte or in eight
_READY = b"\x05READY"
# For the process's own files and local sockets, beside those that it has open: a quarter of all, and no more than this.
RESERVED_DESCRIPTORS = 512
DESCRIPTORS_EACH = 3  # a client's connection, and both ends of what carries its bytes to the router
MOST_UNPROVEN = 4096  # all nodes of a job connect at once when its controller is another one
LEAST_CONNECTIONS = 8
_DESCRIPTORS = "/proc/self/fd"
SILENT_S = 0.2  # for the first word
TURNS = 6  # for so many times a handshake's limit a client may wait until its keys are looked at
HANDSHAKE_S = 1.0  # and until the keys are to be looked at; from then on it goes for no other


class ConnectionClosed(Exception):
    """The peer of a connection is gone, or has sent what no handshake has. Carries why, "" for an ordinary end."""


# --- limits ---------------------------------------------------------------------------------------------------------


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Limits of a listener. Where one is reached the oldest connection that it concerns goes.

    `unproven` connections have not finished their handshake. An identity has more than one connection only while the
    older one has not been noticed to be dead. `carried_bytes`: what one connection carries from a client before it has
    to be made again, and so the most that libzmq collects of a message that never ends.
    """

    connections: int
    unproven: int
    unproven_per_address: int
    per_identity: int = 2
    per_family: int = 1024  # of a key that several peers have
    per_role: int = 32  # of the key that all operators of a role have
    handshake_s: float = 5.0
    idle_s: float | None = None  # without a byte from the client; None: for ever
    carried_bytes: int = 32 * 1024 * 1024
    burst_bytes: int = 32 * 1024 * 1024  # of one identity, over all its connections
    bytes_per_s: int = 8 * 1024 * 1024  # of one identity, after the burst
    role_burst_bytes: int = 1024 * 1024  # of all operators of a role: what they send are small questions
    role_bytes_per_s: int = 32 * 1024


def limits_by_descriptors() -> ConnectionLimits:
    """Return the limits of a listener that may use up all descriptors but those that the process needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(os.listdir(_DESCRIPTORS)) - min(RESERVED_DESCRIPTORS, soft // 4)
    connections = max(LEAST_CONNECTIONS, free // DESCRIPTORS_EACH)
    unproven = min(MOST_UNPROVEN, connections // 2)
    return ConnectionLimits(connections, unproven, max(1, unproven // 2))


def most_of(identity: str, limits: ConnectionLimits) -> int:
    """Return how many connections a key's identity may have."""
    if identity.startswith(OPERATOR_PREFIX):
        return limits.per_role
    return limits.per_family if is_family(identity) else limits.per_identity


class Allowance:
    """The bytes that an identity may still send at once. It grows with time, up to a burst."""

    __slots__ = ("_at_s", "_burst", "_left", "_per_s")

    def __init__(self, identity: str, limits: ConnectionLimits) -> None:
        operators = identity.startswith(OPERATOR_PREFIX)
        self._burst = float(limits.role_burst_bytes if operators else limits.burst_bytes)
        self._per_s = limits.role_bytes_per_s if operators else limits.bytes_per_s
        self._left = self._burst
        self._at_s = 0.0

    def spend(self, count: int, now: float) -> float:
        """Take `count` bytes off; return until when nothing more may be sent, 0 when it may."""
        grown = self._left + (now - self._at_s) * self._per_s
        self._left = min(self._burst, grown) - count
        self._at_s = now
        return 0.0 if self._left >= 0 else now - self._left / self._per_s


# --- one connection -------------------------------------------------------------------------------------------------


class Handshake:
    """The handshake of one connection with CURVE: HELLO, WELCOME, INITIATE, and READY if it is admitted."""

    def __init__(self) -> None:
        self._held = bytearray()  # from the client, not passed on yet
        self._passed = 0  # bytes from the client that were passed on
        self._answer = bytearray()  # from the router

    def from_client(self, data: bytes) -> bytes:
        """Take in bytes of the client; return those that may be passed on. INITIATE is held until `initiate`.

        Raises ValueError when they are too many for a handshake.
        """
        self._held += data
        if self._passed + len(self._held) > LONGEST_BYTES:
            raise ValueError("longer than a handshake")
        hello_end = self._hello_end()
        if hello_end is None:
            return self._pass(max(0, min(len(self._held), _GREETING_BYTES - self._passed)))
        return self._pass(max(0, hello_end - self._passed))

    @property
    def asks(self) -> bool:
        """True when the client has sent all of INITIATE, with which it asks for admission."""
        return self._passed > _GREETING_BYTES and next(_frames(self._held), None) is not None

    @property
    def unwelcome(self) -> bool:
        """True while the router has not answered HELLO, which it does where the client knows its key."""
        return self._passed > _GREETING_BYTES and next(_frames(self._answer[_GREETING_BYTES:]), None) is None

    def initiate(self) -> bytes:
        """Return everything that was held."""
        return self._pass(len(self._held))

    def from_router(self, data: bytes) -> bool | None:
        """Take in bytes of the router; return whether it admitted the client, None while that is open.

        Raises ValueError when they are too many for a handshake.
        """
        self._answer += data
        if len(self._answer) > LONGEST_BYTES:
            raise ValueError("longer than a handshake")
        frames = list(_frames(self._answer[_GREETING_BYTES:]))
        return frames[1].startswith(_READY) if len(frames) > 1 else None

    def _hello_end(self) -> int | None:
        """Return where HELLO ends in all that the client has sent; None before it is complete."""
        if self._passed > _GREETING_BYTES:
            return self._passed
        rest = self._held[_GREETING_BYTES - self._passed :]
        hello = next(_frames(rest), None)
        if hello is None:
            return None
        return _GREETING_BYTES + (_LONG_HEAD if rest[0] & _LONG else _SHORT_HEAD) + len(hello)

    def _pass(self, count: int) -> bytes:
        data = bytes(self._held[:count])
        del self._held[:count]
        self._passed += count
        return data


def _frames(data: bytearray) -> Iterator[bytes]:
    """Yield the bodies of the complete frames at the start of `data`."""
    start = 0
    while len(data) - start >= _SHORT_HEAD:
        long = data[start] & _LONG
        head = _LONG_HEAD if long else _SHORT_HEAD
        if len(data) - start < head:
            return
        size = int.from_bytes(data[start + 1 : start + head], "big")
        if len(data) - start - head < size:
            return
        yield bytes(data[start + head : start + head + size])
        start += head + size


class Connection:
    """A client's socket, and one of its own to the router, opened when the client has said something.

    What one side does not take yet is kept, and the other side is not read meanwhile.
    """

    def __init__(self, client: socket.socket, address: str, now: float, handshake: Handshake | None) -> None:
        self.client = client
        self.router: socket.socket | None = None
        self.address = address
        self.began_s = self.heard_s = now
        self.turn_s: float | None = None  # when the authenticator was asked about its key
        self.handshake = handshake  # None: nothing is left to prove
        self.identity: str | None = None  # of the key that it used
        self.carried_bytes = 0  # from the client, since it was admitted
        self.paused_until_s = 0.0
        self.client_events = self.router_events = 0  # for which its ends are watched
        self.to_router = b""
        self.to_client = b""

    @property
    def proven(self) -> bool:
        """True when the handshake is over."""
        return self.handshake is None

    @property
    def asks(self) -> bool:
        """True while the client waits for admission."""
        return self.handshake is not None and self.handshake.asks

    def read_client(self, connect: Callable[[], socket.socket]) -> int:
        """Carry what the client has sent; return how many bytes. Raises ConnectionClosed or OSError."""
        data = _received(self.client)
        if self.router is None and data:
            if data[0] != SIGNATURE:
                raise ConnectionClosed("no handshake")
            self.router = connect()
        if self.handshake is None:
            self.to_router += data
        else:
            try:
                self.to_router += self.handshake.from_client(data)
            except ValueError as error:
                raise ConnectionClosed("no handshake") from error
        self.write_router()
        return len(data)

    def initiate(self, now: float) -> None:
        """Let the router answer whether the client is admitted."""
        self.turn_s = now
        if self.handshake is not None:
            self.to_router += self.handshake.initiate()
            self.write_router()

    def read_router(self) -> bool | None:
        """Carry what the router has sent; return whether it has just let the client in. Raises as `read_client`."""
        assert self.router is not None
        try:
            data = _received(self.router)
        except ConnectionClosed as closed:
            if self.handshake is None or not self.handshake.unwelcome:
                raise
            raise ConnectionClosed(OTHER_KEYS) from closed
        self.to_client += data
        admitted = None
        if self.handshake is not None and data:
            try:
                admitted = self.handshake.from_router(data)
            except ValueError as error:
                raise ConnectionClosed("no handshake") from error
        self.write_client()
        return admitted

    def write_router(self) -> None:
        """Write what the router has not taken yet."""
        if self.to_router and self.router is not None:
            self.to_router = self.to_router[_sent(self.router, self.to_router) :]

    def write_client(self) -> None:
        """Write what the client has not taken yet."""
        if self.to_client:
            self.to_client = self.to_client[_sent(self.client, self.to_client) :]

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self.client.close()
        if self.router is not None:
            self.router.close()


def _received(end: socket.socket) -> bytes:
    """Return what has arrived, b"" when there is nothing after all."""
    try:
        data = end.recv(CHUNK_BYTES)
    except OSError as error:
        if error.errno in _AGAIN:
            return b""
        raise
    if not data:
        raise ConnectionClosed("")
    return data


def _sent(end: socket.socket, data: bytes) -> int:
    try:
        return end.send(data)
    except OSError as error:
        if error.errno in _AGAIN:
            return 0
        raise


# --- connections that have proven nothing yet -----------------------------------------------------------------------


class Push(msgspec.Struct, frozen=True):
    """A connection that goes for one that comes (None: the one that comes is closed), and why."""

    connection: Connection | None
    reason: str


class WaitingRoom:
    """The connections without a proof, in the order in which they came. `add` and `discard` keep it up."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._all: OrderedDict[Connection, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Connection, None]] = {}

    def add(self, connection: Connection) -> None:
        """Take in a connection that has just been accepted."""
        self._all[connection] = None
        self._by_address.setdefault(connection.address, OrderedDict())[connection] = None

    def discard(self, connection: Connection) -> None:
        """Let go of one that has proven who it is, or was closed."""
        if connection not in self._all:
            return
        del self._all[connection]
        same = self._by_address[connection.address]
        del same[connection]
        if not same:
            del self._by_address[connection.address]

    def overdue(self, now: float) -> Iterator[Connection]:
        """Yield those that have taken longer than any handshake may.

        To wait for the turn at the authenticator is none of it: where a thousand nodes connect at once that of the last
        comes late. But libzmq's clients do not wait for longer than `TURNS` handshakes, and begin again.
        """
        limit_s = self._limits.handshake_s
        for connection in list(self._all):
            if now - connection.began_s < limit_s:
                return
            if connection.turn_s is not None:
                is_over = now - connection.turn_s >= limit_s
            else:
                is_over = not connection.asks or now - connection.began_s >= TURNS * limit_s
            if is_over:
                yield connection

    def is_closed(self, connections: int, now: float) -> bool:
        """Say whether nothing is to be accepted: all places are taken, by connections that still have their time.

        `connections`: how many there are in all, with and without a proof.
        """
        full = len(self._all) >= self._limits.unproven or connections >= self._limits.connections
        return full and bool(self._all) and self._to_go(self._all, now) is None

    def push(self, address: str, connections: int, now: float) -> Push | None:
        """Return what goes for a connection from `address`, if anything has to. Ask `is_closed` before."""
        same = self._by_address.get(address, ())
        if len(same) >= self._limits.unproven_per_address:
            return Push(self._to_go(same, now), "too many connections without a handshake from one address")
        if len(self._all) >= self._limits.unproven:
            return Push(self._to_go(self._all, now), "too many connections without a handshake")
        if connections >= self._limits.connections and self._all:
            return Push(self._to_go(self._all, now), "too many connections")
        return None

    @staticmethod
    def _to_go(connections: Iterable[Connection], now: float) -> Connection | None:
        """Return the oldest that has had its time, and has not asked for admission, which needs a key."""
        for connection in connections:
            age_s = now - connection.began_s
            if age_s < SILENT_S:
                return None  # and those behind it are younger
            if not connection.asks and (connection.router is None or age_s >= HANDSHAKE_S):
                return connection
        return None
