"""Who connects to a rank's listener, asked of all at once.

Anybody can connect, and need not say a word. So all that have connected are listened to together, each for a short
while and only so many at a time: a neighbour does not have to wait for strangers.
"""

import selectors
import socket
import struct
import time
from collections.abc import Callable

from .authenticator import TAG_BYTES, Authenticator

HANDSHAKE = struct.Struct(f"<{TAG_BYTES}sq")  # the proof, the rank that connects
HANDSHAKE_S = 1.0  # for the whole of it; who means well sends it at once
MOST_PENDING = 64  # that have not said who they are; the first of them gives way
_LEAST_S = 0.001


class _Pending:
    """A connection that has not said yet who it is."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.heard = bytearray()


class HandshakeListener:
    """Takes connections at `listener` until one has shown that it is a rank. Used by one thread."""

    def __init__(self, listener: socket.socket, authenticator: Authenticator, nonce: bytes) -> None:
        """`nonce`: what the ranks were told to show that they have read. The listener stays its owner's."""
        self._listener = listener
        self._authenticator = authenticator
        self._nonce = nonce
        self._pending: list[_Pending] = []  # in the order in which they came
        self.rejected = 0

    def accept(self, deadline: float, expected: Callable[[int], bool]) -> tuple[int, socket.socket]:
        """Return the next rank that has connected and is `expected`, with its connection.

        Raises TimeoutError at the deadline, other OSErrors when the listener is shut down.
        """
        self._listener.setblocking(False)
        while True:
            found = self._readable(deadline)
            for pending in [each for each in self._pending if each.connection in found]:
                rank = self._listen(pending)
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
        """Close what has not said who it is. Idempotent."""
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
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        connection.setblocking(False)
        self._pending.append(_Pending(connection, time.monotonic() + HANDSHAKE_S))
        if len(self._pending) > MOST_PENDING:
            self._reject(self._pending[0])

    def _listen(self, pending: _Pending) -> int | None:
        """Read on; return the rank that it is, None while that is not known. Who cannot be one is turned away."""
        try:
            heard = pending.connection.recv(HANDSHAKE.size - len(pending.heard))
        except BlockingIOError:
            return None
        except OSError:
            heard = b""
        pending.heard += heard
        if not heard:
            self._reject(pending)
        if not heard or len(pending.heard) < HANDSHAKE.size:
            return None
        proof, rank = HANDSHAKE.unpack(pending.heard)
        if self._authenticator.verify_handshake(proof, self._nonce, rank):
            return int(rank)
        self._reject(pending)
        return None

    def _reject(self, pending: _Pending) -> None:
        self.rejected += 1
        self._pending.remove(pending)
        pending.connection.close()
