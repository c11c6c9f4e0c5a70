"""The control thread: the processor's line to its agent, and through it to the controller.

It runs beside the train thread and never waits for it: commands are heard while the train thread is stuck in a
collective, which is when they matter.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from ..protocol.codec import decode, encode
from ..protocol.discovery import GIVE_UP_S
from ..protocol.errors import RecoveryError, WireError
from ..protocol.mailbox import Mailbox
from ..protocol.messages import Envelope, Message
from ..protocol.nonblocking import wait
from ..protocol.transport import DealerSocket
from ..protocol.types import CONTROLLER, rank_address

_log = logging.getLogger(__name__)

IDLE_S = 5.0
OUTBOX = 1000


class Client:
    """Owns the control thread, its socket and its mailbox."""

    def __init__(
        self, *, job: str, rank: int, incarnation: int, agent_socket: str, hear: Callable[[Envelope], None]
    ) -> None:
        self._hear = hear
        self._agent_socket = agent_socket
        self._address = rank_address(rank)
        # The incarnation, not the time: clocks of two nodes need not agree on which process is the newer one.
        self._mailbox = Mailbox(job=job, address=self._address, session=incarnation, give_up_s=GIVE_UP_S)
        self._outbox: queue.Queue[tuple[Message, int]] = queue.Queue(OUTBOX)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._quiet = threading.Event()  # nothing is waiting to be sent or acknowledged
        self._quiet.set()
        self._thread = threading.Thread(target=self._run, name="midstep-control", daemon=True)
        self._thread.start()

    def post(self, body: Message, generation: int) -> None:
        """Send a report to the controller, reliably. From any thread; returns at once.

        Raises RecoveryError when the client was closed.
        """
        if self._stopping.is_set():
            raise RecoveryError(f"{type(body).__name__} cannot be reported any more: this process is about to end")
        self._quiet.clear()
        self._outbox.put((body, generation), timeout=IDLE_S)
        os.eventfd_write(self._wake, 1)

    def flush(self, limit_s: float) -> bool:
        """Wait until everything posted has been acknowledged; False when `limit_s` passes first."""
        return self._quiet.wait(limit_s)

    def close(self) -> None:
        """End the control thread and its socket. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(IDLE_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        socket = DealerSocket(self._agent_socket, identity=self._address, curve=None)
        try:
            while not self._stopping.is_set():
                self._turn(socket)
        finally:
            socket.close()

    def _turn(self, socket: DealerSocket) -> None:
        now = time.monotonic()
        due = self._mailbox.next_due()
        timeout_s = IDLE_S if due is None else min(IDLE_S, max(0.0, due - now))
        wait([socket], [self._wake], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for received in socket.receive():
            self._take(socket, received.data)
        now = time.monotonic()
        while not self._outbox.empty():
            body, generation = self._outbox.get_nowait()
            self._mailbox.generation = max(self._mailbox.generation, generation)
            socket.send(encode(self._mailbox.post(body, CONTROLLER, now)))
        for envelope in self._mailbox.due(now):
            socket.send(encode(envelope))
        for envelope in self._mailbox.undeliverable(now):
            _log.error("no controller took %s in time", type(envelope.body).__name__)
        if self._mailbox.next_due() is None and self._outbox.empty():
            self._quiet.set()

    def _take(self, socket: DealerSocket, data: bytes) -> None:
        try:
            envelope = decode(data)
        except WireError as error:
            self._mailbox.refused[type(error).__name__] += 1
            return
        taken = self._mailbox.take(envelope, time.monotonic())
        if taken.reply is not None:
            socket.send(encode(taken.reply))
        if taken.deliver:
            self._hear(envelope)
            if envelope.number:
                socket.send(encode(self._mailbox.acknowledge(envelope)))
