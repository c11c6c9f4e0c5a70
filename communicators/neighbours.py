"""A rank's own sockets to a few other ranks, for the commit barrier and the swap of rank-local state.

Both are a few kilobytes in every step, between ranks that wait for each other. A backend's collective hands such a
message from thread to thread on both sides, which costs more than the message. Here the train thread itself writes to
a socket and reads from one, and an abort shuts the sockets down.

Connections are one-way: a rank connects to the ranks it sends to, and accepts those it receives from. A rank that
connects must prove that it knows the generation's secret. What travels then is as open as the backend's own traffic.
"""

import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence

from ..protocol.errors import CommunicatorError
from .base import Gathering, Met
from .generation_scope import GenerationScope
from .handshake import HANDSHAKE, NONCE_BYTES, Authenticator, HandshakeListener, Listener, NeighbourAddress

CHUNK_BYTES = 32 * 1024
_BUFFER_BYTES = 4 * CHUNK_BYTES  # a chunk fits while the other side does not read
# Number of the exchange, its kind, length of what follows; of a barrier 1 for those who agree, 2 where what is gathered
# follows with its length, and four times the highest verdict that is known so far.
_HEAD = struct.Struct("<QQQ")
_LENGTH = struct.Struct("<Q")
_BARRIER, _SWAP, _SWAP_APART = 1, 2, 3
_MIN_S = 0.001
_BACKLOG = 128
_MAX_BYTES = 1 << 30


class Neighbours:
    """The sockets of one rank in one generation. Used by one thread, mostly the train thread; `cut` by any.

    All ranks must call `swap` and `barrier` in the same order, but for swaps that are `apart`: these are in the same
    order among the barriers and swaps of the two ranks of a connection. When a neighbour is gone, or nothing comes for
    `limit_s`, the scope fails; when the scope ends for any reason, its owner cuts the sockets.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str,
        *,
        limit_s: float,
        scope: GenerationScope,
        authenticator: Authenticator,
        buffer_bytes: int | None = _BUFFER_BYTES,
    ) -> None:
        """Listen on `host`; None for `buffer_bytes` leaves the kernel the choice. Raises CommunicatorError."""
        self._scope = scope
        self.rank = rank
        self.world_size = world_size
        self._limit_s = limit_s
        self._buffer_bytes = buffer_bytes
        self._authenticator = authenticator
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._lock = threading.Lock()
        self._over = False
        self._addresses: Mapping[int, NeighbourAddress] = {}
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise CommunicatorError(f"rank {rank} cannot listen on {host}: {error}") from error
        self._handshakes = HandshakeListener(self._listener, authenticator, self._nonce)
        self._number = 0  # exchanges so far
        self._head = bytearray(_HEAD.size)

    @property
    def address(self) -> NeighbourAddress:
        """Return the address that the other ranks connect to."""
        host, port = self._listener.getsockname()[:2]
        return NeighbourAddress(Listener(host, port), self._nonce)

    def expect(self, addresses: Sequence[NeighbourAddress]) -> None:
        """Set the addresses of all ranks, in their order."""
        self.expect_some(dict(enumerate(addresses)))

    def expect_some(self, addresses: Mapping[int, NeighbourAddress]) -> None:
        """Set the addresses of those ranks that this one will connect to."""
        self._addresses = addresses

    def connect(self, deadline: float) -> None:
        """Connect to the neighbours of the barrier, and pass it once. Runs in rebuild. Raises as `barrier`."""
        for distance in self._distances():
            self.connection_to((self.rank + distance) % self.world_size, deadline)
        for distance in self._distances():
            self.connection_from((self.rank - distance) % self.world_size, deadline)
        timeout_s = self._limit_s
        self._limit(max(_MIN_S, deadline - time.monotonic()))
        self.barrier()
        self._limit(timeout_s)

    def barrier(self, *, agrees: bool = False, verdict: int = 0, gathering: Gathering | None = None) -> Met:
        """Wait until all ranks have entered the barrier: in each round a rank learns of twice as many.

        Return whether all of them agree, and the highest verdict of any (up to 2^28): the same on each. What is
        gathered travels along.

        Raises CommunicatorAborted or CommunicatorFailed, as does `swap`.
        """
        self._number += 1
        try:
            for distance in self._distances():
                outgoing, source = self._to[(self.rank + distance) % self.world_size], self.rank - distance
                said = b"" if gathering is None else gathering.said()
                head = _HEAD.pack(self._number, _BARRIER, verdict << 2 | bool(said) << 1 | agrees)
                outgoing.sendall(head + _LENGTH.pack(len(said)) + said[:CHUNK_BYTES] if said else head)
                theirs = self._take_head(source % self.world_size, _BARRIER, self._number)
                agrees, verdict = bool(theirs & 1) and agrees, max(verdict, theirs >> 2)
                if said or theirs & 2:
                    incoming = self._from[source % self.world_size]
                    heard = self._take_turns(said, self._take_length(incoming) if theirs & 2 else 0, outgoing, incoming)
                    if gathering is not None and heard:
                        gathering.heard(heard)
        except OSError as error:
            raise self._lost("barrier", error) from error
        return Met(agrees, verdict)

    def swap(self, blob: bytes, to: int, source: int, *, apart: bool = False) -> bytes:
        """Send `blob` to rank `to` and return what `source` sends, which must name this rank as its `to`.

        `apart`: other ranks do fewer of these swaps, or more.
        """
        self._number += not apart
        number, kind = (0, _SWAP_APART) if apart else (self._number, _SWAP)
        deadline = time.monotonic() + self._limit_s
        outgoing, incoming = self.connection_to(to, deadline), self.connection_from(source, deadline)
        try:
            outgoing.sendall(_HEAD.pack(number, kind, len(blob)) + blob[:CHUNK_BYTES])
            return self._take_turns(blob, self._take_head(source, kind, number), outgoing, incoming)
        except OSError as error:
            raise self._lost("swap", error) from error

    def cut(self) -> None:
        """Shut the sockets down: calls under way, and all later ones, fail. Any thread; returns at once."""
        with self._lock:
            self._over = True
            for connection in (self._listener, *self._to.values(), *self._from.values()):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # it is down already
                    continue

    def close(self) -> None:
        """Close the sockets. In the thread that uses them."""
        self.cut()
        self._handshakes.close()
        with self._lock:
            for connection in (self._listener, *self._to.values(), *self._from.values()):
                connection.close()

    def _distances(self) -> Sequence[int]:
        return [1 << power for power in range((self.world_size - 1).bit_length())]

    def connection_to(self, rank: int, deadline: float) -> socket.socket:
        """Return the connection to `rank`; connect on first use."""
        if rank in self._to:
            return self._to[rank]
        listener, nonce = self._addresses[rank]
        connection = socket.socket(self._listener.family, socket.SOCK_STREAM)
        try:
            self._keep(self._to, rank, connection)  # before it is connected, so that `cut` ends that, too
            connection.settimeout(max(_MIN_S, deadline - time.monotonic()))
            connection.connect((listener.host, listener.port))
            connection.settimeout(None)
            connection.sendall(HANDSHAKE.pack(self._authenticator.handshake_tag(nonce, self.rank), self.rank))
        except OSError as error:
            raise self._lost(f"connecting to rank {rank}", error) from error
        return connection

    def connection_from(self, rank: int, deadline: float) -> socket.socket:
        """Return the connection from `rank`; accept on first use, and keep other ranks that connect first."""
        while rank not in self._from:
            try:
                peer, connection = self._handshakes.accept(deadline, self._is_awaited)
                self._keep(self._from, peer, connection)
            except OSError as error:
                raise self._lost(f"waiting for rank {rank} to connect", error) from error
        return self._from[rank]

    def _is_awaited(self, rank: int) -> bool:
        return 0 <= rank < self.world_size and rank not in self._from

    def _keep(self, where: dict[int, socket.socket], rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer_bytes)
        connection.settimeout(None)  # the kernel's timeout: Python's own would cost one more call for each message
        _limit(connection, self._limit_s)
        with self._lock:
            where[rank] = connection
            if self._over:
                raise ConnectionAbortedError("the sockets were cut")

    def _limit(self, seconds: float) -> None:
        self._limit_s = seconds
        for connection in (*self._to.values(), *self._from.values()):
            _limit(connection, seconds)

    def _take_head(self, source: int, kind: int, number: int) -> int:
        """Return how many bytes of this exchange follow from `source`."""
        self._fill(self._from[source], memoryview(self._head))
        their_number, their_kind, length = _HEAD.unpack(self._head)
        if (their_number, their_kind) != (number, kind):
            raise ConnectionError(f"rank {source} is at another exchange of this generation than rank {self.rank}")
        if length > _MAX_BYTES:
            raise ConnectionError(f"rank {source} announces {length} bytes, more than any rank-local state has")
        return int(length)

    def _take_length(self, connection: socket.socket) -> int:
        """Return how many bytes follow that were gathered."""
        found = bytearray(_LENGTH.size)
        self._fill(connection, memoryview(found))
        (length,) = _LENGTH.unpack(found)
        if length > _MAX_BYTES:
            raise ConnectionError(f"a neighbour announces {length} bytes in a barrier")
        return int(length)

    def _take_turns(self, blob: bytes, length: int, outgoing: socket.socket, incoming: socket.socket) -> bytes:
        """Send `blob` but for its first chunk, which has gone with the head; return the `length` bytes that arrive.

        Chunk by chunk, so that no ring of ranks can all be stuck sending.
        """
        arriving = memoryview(bytearray(length))
        for start in range(0, max(len(blob), length), CHUNK_BYTES):
            if start:
                outgoing.sendall(blob[start : start + CHUNK_BYTES])
            self._fill(incoming, arriving[start : start + CHUNK_BYTES])
        return bytes(arriving)

    @staticmethod
    def _fill(connection: socket.socket, view: memoryview) -> None:
        while view:
            count = connection.recv_into(view)
            if not count:
                raise ConnectionError("a neighbour closed the connection")
            view = view[count:]

    def _lost(self, op: str, error: OSError) -> CommunicatorError:
        if isinstance(error, BlockingIOError):  # EAGAIN: the socket's timeout has passed
            error = TimeoutError(f"nothing came for {self._limit_s:g} s")
        return self._scope.fail(op, error)


def _limit(connection: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    limit = struct.pack("@ll", whole, int((seconds - whole) * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
