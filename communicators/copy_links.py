"""The sockets over which a rank hands its copies in host memory to the rank that keeps them, and hears what came of it.

They belong to one generation, whose store says where the keeper listens, and whose secret proves who connects. No
collective waits for them, and they wait for none: they have threads of their own, and end when their owner cuts them.
What moves nothing for `LIMIT_S` has failed; how long it is until the next copy comes does not matter.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ..protocol.errors import CommunicatorAborted, CommunicatorError, CommunicatorFailed, MidstepError
from ..protocol.types import Rendezvous
from .generation_scope import error_text
from .handshake import HANDSHAKE, NONCE_BYTES, HandshakeListener, Listener, NeighbourAddress, PairMember
from .own_sockets import local_address
from .rendezvous import GenerationStore, StoreConnection

T = TypeVar("T")

LIMIT_S = 10.0
_NAME = "copies"
_PIECE_BYTES = 8 << 20
_LOOK_S = 0.05  # between two looks for the keeper
_ACCEPT_S = 3600.0  # a wait for the guest is begun again after that
_BACKLOG = 8


class CopyConnection:
    """A connection to one rank. Used by one thread; ends when its links are cut."""

    def __init__(self, links: "CopyLinks", connected: socket.socket) -> None:
        self._links = links
        self._socket = connected

    def send(self, data: memoryview | bytes) -> None:
        """Send all of it. Raises CommunicatorAborted or CommunicatorFailed."""
        self._socket.settimeout(LIMIT_S)
        with memoryview(data) as whole:
            for start in range(0, len(whole), _PIECE_BYTES):
                with whole[start : start + _PIECE_BYTES] as piece:
                    self._links.doing("sending", partial(self._socket.sendall, piece))

    def receive(self, length: int, *, limit_s: float | None = LIMIT_S) -> bytes:
        """Return what comes next; `limit_s` None: whenever that is. Raises as `send` does."""
        data = bytearray(length)
        self._socket.settimeout(limit_s)
        self.receive_into(memoryview(data), limited=limit_s is not None)
        return bytes(data)

    def receive_into(self, view: memoryview, *, limited: bool = True) -> None:
        """Fill `view` with what comes next. Raises as `send` does."""
        while view:
            count = self._links.doing("receiving", partial(self._socket.recv_into, view[:_PIECE_BYTES]))
            if not count:
                raise self._links.lost("receiving", ConnectionError("the other side closed the connection"))
            view = view[count:]
            if not limited:  # it has begun to come
                limited = True
                self._socket.settimeout(LIMIT_S)

    def close(self) -> None:
        """Close it."""
        self._links.forget(self._socket)


class CopyLinks:
    """The ends of one rank in one generation: to the rank that keeps its copies, and from the one whose copies it has.

    `listen` and `accept` are for one thread, `connect` for another; `cut` for any.
    """

    def __init__(self, rank: int, generation: int, rendezvous: Rendezvous, link_up_s: float) -> None:
        """Open nothing yet. `link_up_s` is the time to reach the store."""
        self._rank = rank
        self._generation = generation
        self._rendezvous = rendezvous
        self._link_up_s = link_up_s
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._handshakes: HandshakeListener | None = None

    def listen(self) -> None:
        """Say in the store where this rank takes copies. Raises CommunicatorAborted or another CommunicatorError."""
        store = self._store()
        host = local_address(self._rendezvous)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = self.doing("listening", lambda: socket.create_server((host, 0), family=family, backlog=_BACKLOG))
        self._keep(listener)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._handshakes = HandshakeListener(listener, store.authenticator, nonce)
        address = NeighbourAddress(Listener(*listener.getsockname()[:2]), nonce)
        self._asking(lambda: store.publish(_NAME, self._rank, PairMember(address)))

    def accept(self, guest: int) -> CopyConnection:
        """Return the next connection from `guest`, whenever it comes. Raises as `listen` does."""
        handshakes = self._handshakes
        assert handshakes is not None
        while True:
            deadline = time.monotonic() + _ACCEPT_S
            try:
                _, connected = handshakes.accept(deadline, lambda rank: rank == guest)
            except TimeoutError:
                continue
            except OSError as error:
                raise self.lost("accepting", error) from error
            return self._connection(connected)

    def connect(self, keeper: int) -> CopyConnection:
        """Return a connection to the rank that keeps this one's copies. Raises as `listen` does."""
        store, deadline = self._store(), time.monotonic() + LIMIT_S
        while not self._asking(lambda: store.have_published(_NAME, [keeper])):
            if time.monotonic() > deadline:
                raise CommunicatorFailed(f"rank {keeper} has not said within {LIMIT_S:g} s where it takes copies")
            if self._over.wait(_LOOK_S):
                raise self.lost("connecting", ConnectionError("cut"))
        (listener, nonce) = self._asking(lambda: store.read(_NAME, [keeper], PairMember))[keeper].neighbours
        where = (listener.host, listener.port)
        connected = self.doing("connecting", lambda: socket.create_connection(where, timeout=LIMIT_S))
        connection = self._connection(connected)
        connection.send(HANDSHAKE.pack(store.authenticator.handshake_tag(nonce, self._rank), self._rank))
        return connection

    def cut(self) -> None:
        """End what is under way, and all that comes later. Any thread; returns at once. Idempotent."""
        with self._lock:
            self._over.set()
            for each in self._sockets:
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:  # it is down already
                    continue

    def close(self) -> None:
        """Cut, and close all sockets. When no thread uses them any more."""
        self.cut()
        if self._handshakes is not None:
            self._handshakes.close()
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets.clear()

    def doing(self, what: str, act: Callable[[], T]) -> T:
        """Return what `act` returns. Raises CommunicatorAborted or CommunicatorFailed where it raises OSError."""
        try:
            return act()
        except OSError as error:
            raise self.lost(what, error) from error

    def lost(self, what: str, error: Exception) -> CommunicatorError:
        """Return the error for what has failed: CommunicatorAborted once the links are cut."""
        if self._over.is_set():
            return CommunicatorAborted(f"{what} a copy was cut")
        reason = f"nothing has moved for {LIMIT_S:g} s" if isinstance(error, TimeoutError) else error_text(error)
        return CommunicatorFailed(f"{what} a copy failed: {reason}")

    def forget(self, connected: socket.socket) -> None:
        """Close one socket."""
        with self._lock:
            self._sockets.discard(connected)
        connected.close()

    def _store(self) -> GenerationStore:
        connection = self._asking(lambda: StoreConnection(self._rendezvous, self._link_up_s))
        return GenerationStore(connection, self._rendezvous, self._generation)

    def _asking(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except Exception as error:  # torch's C++ turns what a store sends into errors of any kind
            if isinstance(error, MidstepError) and not self._over.is_set():
                raise
            raise self.lost("asking the store about", error) from error

    def _connection(self, connected: socket.socket) -> CopyConnection:
        self._keep(connected)
        connected.settimeout(LIMIT_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return CopyConnection(self, connected)

    def _keep(self, opened: socket.socket) -> None:
        with self._lock:
            if not self._over.is_set():
                self._sockets.add(opened)
                return
        opened.close()
        raise CommunicatorAborted("the links for copies were cut")
