"""Messages between ranks, any number under way at once, driven by the thread that waits for one of them.

There is no thread behind it: a call that waits moves all messages forward, its own and the others, until what it
waits for is done; a send moves what the socket takes at once. So two ranks that send to each other cannot both be
stuck, however large the messages are. What was sent first to a rank arrives there first, and is received into the
buffer that was given first.
"""

import contextlib
import select
import socket
import time
from collections import deque
from typing import Any

from .generation_scope import GenerationScope
from .host_memory import memory_of
from .neighbours import Neighbours


class PendingMessage:
    """A buffer that is being sent or received. It is kept until all of it has moved."""

    def __init__(self, messages: "Messages", buffer: Any) -> None:
        self._messages = messages
        self.left = memory_of(buffer)

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return not self.left

    def wait(self) -> bool:
        """Move messages until this one is done. Raises CommunicatorAborted or CommunicatorFailed."""
        self._messages.move_until(self)
        return True


class Messages:
    """All messages of one rank in one generation. Used by one thread; `Neighbours.cut` ends its waits."""

    def __init__(self, neighbours: Neighbours, scope: GenerationScope, limit_s: float) -> None:
        """A wait in which nothing moves for `limit_s` fails, and with it the scope."""
        self._neighbours = neighbours
        self._scope = scope
        self._limit_s = limit_s
        self._outgoing: dict[int, deque[PendingMessage]] = {}
        self._incoming: dict[int, deque[PendingMessage]] = {}

    def isend(self, buffer: Any, rank: int) -> PendingMessage:
        """Start to send a contiguous buffer. Raises CommunicatorAborted or CommunicatorFailed, as does `irecv`."""
        self._neighbours.connection_to(rank, time.monotonic() + self._limit_s)
        message = self._queue(self._outgoing, buffer, rank)
        if rank in self._outgoing:  # the peer need not wait until this rank does
            try:
                self._move(self._outgoing, rank, self._send)
            except OSError as error:
                raise self._scope.fail("message", error) from error
        return message

    def irecv(self, buffer: Any, rank: int) -> PendingMessage:
        """Start to receive into a contiguous buffer. Waits until `rank` has begun to send to this rank."""
        self._neighbours.connection_from(rank, time.monotonic() + self._limit_s)
        return self._queue(self._incoming, buffer, rank)

    def _queue(self, where: dict[int, "deque[PendingMessage]"], buffer: Any, rank: int) -> PendingMessage:
        message = PendingMessage(self, buffer)
        if message.left:
            where.setdefault(rank, deque()).append(message)
        return message

    def move_until(self, message: PendingMessage) -> None:
        """Move all messages until this one is done. Raises CommunicatorAborted or CommunicatorFailed."""
        deadline = time.monotonic() + self._limit_s
        while message.left:
            try:
                if self._move_what_can():
                    deadline = time.monotonic() + self._limit_s
                elif message.left:
                    self._await_any(deadline)
            except OSError as error:
                raise self._scope.fail("message", error) from error
        if self._scope.reason is not None:
            raise self._scope.error("message")

    def _move_what_can(self) -> bool:
        moved = False
        for rank in [*self._outgoing]:
            moved |= self._move(self._outgoing, rank, self._send)
        for rank in [*self._incoming]:
            moved |= self._move(self._incoming, rank, self._receive)
        return moved

    def _move(self, where: dict[int, "deque[PendingMessage]"], rank: int, move: Any) -> bool:
        queue, moved = where[rank], False
        with contextlib.suppress(BlockingIOError):
            while queue:
                count = move(rank, queue[0].left)
                queue[0].left = queue[0].left[count:]
                moved = True
                if not queue[0].left:
                    queue.popleft()
        if not queue:
            del where[rank]
        return moved

    def _send(self, rank: int, view: memoryview) -> int:
        return self._to(rank).send(view, socket.MSG_DONTWAIT)

    def _receive(self, rank: int, view: memoryview) -> int:
        count = self._from(rank).recv_into(view, 0, socket.MSG_DONTWAIT)
        if not count:
            raise ConnectionError(f"rank {rank} closed the connection")
        return count

    def _await_any(self, deadline: float) -> None:
        """Wait until a message can move. Raises TimeoutError at the deadline."""
        poll = select.poll()
        for rank in self._outgoing:
            poll.register(self._to(rank), select.POLLOUT)
        for rank in self._incoming:
            poll.register(self._from(rank), select.POLLIN)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError(f"no message has moved for {self._limit_s:g} s")

    def _to(self, rank: int) -> socket.socket:
        return self._neighbours.connection_to(rank, time.monotonic() + self._limit_s)

    def _from(self, rank: int) -> socket.socket:
        return self._neighbours.connection_from(rank, time.monotonic() + self._limit_s)
