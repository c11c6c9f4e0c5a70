"""A zmq socket that never blocks, and never misses an arrival.

A zmq file descriptor is edge-triggered: it becomes readable when something *changes*, and both sending and
receiving can use that change up. Waiting on the bare descriptor therefore hangs now and then. Two ways that do not:

- asyncio: `socket.attach(loop, callback)`. The callback gets what arrived; sending re-checks by itself.
- a plain thread: `wait(sockets, descriptors, timeout_s)`, then `receive()`. What is left is found by the next `wait`.

A caller that adds the descriptor to a loop by hand calls `receive()` after every event *and after every send*, and
again while `pending` is True.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from .codec import MAX_FRAME_BYTES

RECEIVE_LIMIT = 1_000  # messages per receive(), so that one caller's turn has an end
RECEIVE_LIMIT_BYTES = 64 * 1024 * 1024
HIGH_WATER_MARK = 10_000  # messages per peer
_ENVELOPE_BYTES = 1024  # what CURVE adds to a message on the wire, generously
_KEEPALIVE_IDLE_S = 30
_KEEPALIVE_INTERVAL_S = 10
_KEEPALIVE_PROBES = 3
Context = zmq.Context[zmq.Socket[bytes]]
MISFIT_S = 3.0  # handshakes that fail for so long do not fail because a controller comes up or goes
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class HandshakeWatch:
    """The handshakes of one socket. `reached`: something listens there. `admitted`: the keys fit.

    `turned_away`: the keys are those of the server, and the client's are not admitted. `misfit`: the server has others.
    """

    def __init__(self) -> None:
        self.reached = self.admitted = self.turned_away = False
        self._misfits: list[float] = []
        self._monitor: zmq.Socket[bytes] | None = None

    def attach(self, socket: zmq.Socket[bytes]) -> None:
        """Watch a socket that is yet to connect: what happens before is never told."""
        self._monitor = socket.get_monitor_socket(_EVENTS)

    @property
    def monitor(self) -> "zmq.Socket[bytes]":
        """Is readable when there is something to look at. Not before a socket is watched."""
        assert self._monitor is not None
        return self._monitor

    @property
    def misfit(self) -> bool:
        """True when handshakes have failed for longer than a controller takes to come up or go."""
        return bool(self._misfits) and self._misfits[-1] - self._misfits[0] >= MISFIT_S

    def look(self) -> None:
        """Take note of what has happened since."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())["event"]
            self.reached = True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.admitted = True
                self._misfits.clear()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.turned_away = True
            elif event != zmq.EVENT_CONNECTED:
                self._misfits.append(time.monotonic())

    def close(self) -> None:
        """Hear no more, after the socket was closed. Idempotent."""
        if self._monitor is not None:
            self._monitor.close(linger=0)


class Received(msgspec.Struct, frozen=True, gc=False):
    """One message. `identity`: of the connection, "" at a dealer. `user_id`: the identity of the key, if any."""

    identity: str
    user_id: str | None
    data: bytes


Callback = Callable[[list[Received]], None]


class NonblockingSocket:
    """The base of both kinds of socket: options, draining, the asyncio wiring. Belongs to one thread."""

    def __init__(self, kind: int, context: Context | None, watch: HandshakeWatch | None = None) -> None:
        self._refused: Counter[str] = Counter()
        self._owns_context = context is None
        self._context: Context = zmq.Context() if context is None else context
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._watch = watch
        if watch is not None:
            watch.attach(self._socket)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callback: Callback | None = None
        self._check: asyncio.Handle | None = None
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_FRAME_BYTES + _ENVELOPE_BYTES
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)

    @property
    def raw(self) -> zmq.Socket[bytes]:
        """The zmq socket, for a poller."""
        return self._socket

    @property
    def refused(self) -> Counter[str]:
        """The count of refused and dropped messages so far, by reason."""
        return Counter(self._refused)

    @property
    def pending(self) -> bool:
        """True when `receive()` has something to do now. Asking does not use up what has come."""
        events = cast(int, self._socket.getsockopt(zmq.EVENTS))
        return bool(events & zmq.POLLIN or (self.wants_to_send and events & zmq.POLLOUT))

    @property
    def wants_to_send(self) -> bool:
        """True while something waits here until the socket can send."""
        return False

    def fileno(self) -> int:
        """Return the edge-triggered descriptor (see the module's text)."""
        return self._socket.fileno()

    def receive(self, limit: int = RECEIVE_LIMIT) -> list[Received]:
        """Return what has arrived, without waiting. At most `limit` messages; look at `pending` for more."""
        received: list[Received] = []
        size = 0
        for _ in range(limit):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            message = self._accept(frames)
            if message is not None:
                received.append(message)
                size += len(message.data)
                if size >= RECEIVE_LIMIT_BYTES:
                    break
        return received

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callback) -> None:
        """Call `callback` in `loop` with what arrives, until `detach()` or `close()`."""
        self.detach()
        self._loop, self._callback = loop, callback
        loop.add_reader(self.fileno(), self._on_event)
        self._check_soon()  # what arrived before has used its edge up

    def detach(self) -> None:
        """Undo `attach`. Idempotent."""
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.fileno())
        self._loop = self._callback = None

    def close(self) -> None:
        """Close the socket, and the context if it is its own. What is not sent yet is dropped. Idempotent."""
        if self._socket.closed:
            return
        self.detach()
        self._socket.close(linger=0)
        if self._watch is not None:
            self._watch.close()
        self._release()
        if self._owns_context:
            self._context.term()

    def _release(self) -> None:
        """Release what a kind of socket holds beside the socket, before the context ends."""

    def _accept(self, frames: Sequence[zmq.Frame]) -> Received | None:
        raise NotImplementedError

    def _check_soon(self) -> None:
        if self._loop is not None and self._check is None:
            self._check = self._loop.call_soon(self._on_event)

    def _on_event(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if self._callback is None:
            return
        received = self.receive()
        try:
            if received:
                self._callback(received)
        finally:
            # Also when the callback failed: the edge is used up, and no later event would come for the rest.
            if not self._socket.closed and self.pending:
                self._check_soon()

    def _transmit(self, frames: list[bytes]) -> bool:
        """Send without waiting; False when the queue to the peer is full or there is no connection."""
        sent = True
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            sent = False
        # To send uses up the edge of what has just come. What is tried from the event loop and fails must not bring on
        # the next try by itself: without a connection that would go round and round.
        if sent or self.pending:
            self._check_soon()
        return sent


def wait(
    sockets: Sequence[NonblockingSocket], descriptors: Sequence[int], timeout_s: float
) -> tuple[list[NonblockingSocket], list[int]]:
    """Wait, in a plain thread, until a socket can `receive()`, a descriptor is readable, or `timeout_s` is over.

    Another thread wakes this one through a descriptor (a pipe or an eventfd, which the caller drains). Sending is
    not thread-safe: hand the message over and wake the owner of the socket.
    """
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket.raw, zmq.POLLIN | zmq.POLLOUT if socket.wants_to_send else zmq.POLLIN)
    for descriptor in descriptors:
        poller.register(descriptor, zmq.POLLIN)
    ready: dict[object, int] = dict(poller.poll(max(0, round(timeout_s * 1000))))
    return [socket for socket in sockets if socket.raw in ready], [fd for fd in descriptors if fd in ready]
