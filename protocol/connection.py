"""One client connection of the front, and its counterpart at the router."""

import errno
import socket
from collections.abc import Callable

from .handshake import SIGNATURE, Handshake

CHUNK_BYTES = 256 * 1024
OTHER_KEYS = "handshake with the keys of another job"  # or another token: the router cannot read a word of it
_AGAIN = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})


class ConnectionClosed(Exception):
    """The peer of a connection is gone, or has sent what no handshake has. Carries why, "" for an ordinary end."""


class Connection:
    """A client's socket, and one of its own to the router, opened when the client has said something.

    What one side does not take yet is kept, and the other side is not read meanwhile.
    """

    def __init__(self, client: socket.socket, address: str, now: float, handshake: Handshake | None) -> None:
        self.client = client
        self.router: socket.socket | None = None
        self.address = address
        self.began_s = self.heard_s = now
        self.handshake = handshake  # None: nothing is left to prove
        self.identity: str | None = None  # of the key that it used
        self.carried_bytes = 0  # from the client, since it was admitted
        self.paused_until_s = 0.0
        self.to_router = b""
        self.to_client = b""

    @property
    def proven(self) -> bool:
        """Whether the handshake is over."""
        return self.handshake is None

    @property
    def asks(self) -> bool:
        """Whether the client waits for admission."""
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

    def initiate(self) -> None:
        """Let the router answer whether the client is admitted."""
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
