"""The control thread: the processor's line to its agent, and through it to the controller.

It runs beside the train thread and never waits for it: commands are heard while the train thread is stuck in a
collective, which is when they matter.

A rank that trains on without this line cannot be stopped, so it can do harm. What one message causes is counted and the
thread continues; a thread that cannot continue ends its process, which the agent sees at once.
"""

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

import msgspec

from ..protocol.codec import decode, encode, pack, unpack
from ..protocol.discovery import GIVE_UP_S
from ..protocol.errors import MailboxFull, RecoveryError, WireError
from ..protocol.mailbox import Mailbox
from ..protocol.messages import Envelope, Message
from ..protocol.nonblocking import wait
from ..protocol.transport import DealerSocket
from ..protocol.types import CONTROLLER, rank_address

_log = logging.getLogger(__name__)

IDLE_S = 5.0
OUTBOX = 1000
MAX_FAILED_TURNS = 5  # in a row
PAUSE_S = 0.1  # after a failed turn


class Client:
    """Owns the control thread, its socket and its mailbox.

    `hear` is called in the control thread with each command. `die` is called there, with a text, when the line to the
    agent cannot be kept up; it must end the process.
    """

    def __init__(
        self,
        *,
        job: str,
        rank: int,
        incarnation: int,
        agent_socket: str,
        world_size: int = 1,
        hear: Callable[[Envelope], None],
        die: Callable[[str], None] | None = None,
    ) -> None:
        self._hear = hear
        self._die = die or _end_process
        self._agent_socket = agent_socket
        self._address = rank_address(rank)
        # The incarnation, not the time: clocks of two nodes need not agree on which process is the newer one.
        self._mailbox = Mailbox(job=job, address=self._address, session=incarnation, give_up_s=GIVE_UP_S)
        self._mailbox.expect_ranks(world_size)
        self._outbox: queue.Queue[tuple[Message, int]] = queue.Queue(OUTBOX)
        self._leaving: list[bytes] = []  # what this turn of the control thread has for the controller
        self.failures: Counter[str] = Counter()  # what could not be taken in or sent, by the name of the error
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._quiet = threading.Event()  # nothing is waiting to be sent or acknowledged
        self._quiet.set()
        self._thread = threading.Thread(target=self._run, name="midstep-control", daemon=True)
        self._thread.start()

    def post(self, body: Message, generation: int) -> None:
        """Send a report to the controller, reliably. From any thread; returns at once, or within IDLE_S.

        Raises RecoveryError when the client was closed, or takes nothing any more.
        """
        if self._stopping.is_set():
            raise RecoveryError(f"{type(body).__name__} cannot be reported any more: this process is about to end")
        own = threading.current_thread() is self._thread  # which must not wait for itself
        self._quiet.clear()
        try:
            self._outbox.put((body, generation), block=not own, timeout=IDLE_S)
        except queue.Full:
            raise RecoveryError(
                f"{type(body).__name__} cannot be reported: {OUTBOX} reports wait, and the control thread has taken "
                f"none of them for {IDLE_S:g} s"
            ) from None
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
        try:
            self._listen()
        except BaseException as error:
            if not self._stopping.is_set():
                text = "".join(traceback.format_exception(error))
                self._die(
                    f"the line of {self._address} to its agent is lost, so it could not be stopped any more: {text}"
                )

    def _listen(self) -> None:
        socket = DealerSocket(self._agent_socket, identity=self._address, curve=None)
        failed_turns = 0
        try:
            while not self._stopping.is_set():
                try:
                    self._turn(socket)
                    failed_turns = 0
                except Exception as error:
                    failed_turns += 1
                    if failed_turns >= MAX_FAILED_TURNS:
                        raise
                    self._failed(error, "a turn of the control thread failed")
                    self._stopping.wait(PAUSE_S)
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
            self._open(received.data)
        now = time.monotonic()
        self._send_posted(now)
        for envelope in self._mailbox.due(now):
            self._send(envelope)
        for envelope in self._mailbox.undeliverable(now):
            _log.error("no controller acknowledged %s in time", type(envelope.body).__name__)
        self._flush(socket)
        if self._mailbox.next_due() is None and self._outbox.empty():
            self._quiet.set()

    def _send_posted(self, now: float) -> None:
        for _ in range(OUTBOX):  # and no more in one turn: commands are to be heard in between
            try:
                body, generation = self._outbox.get_nowait()
            except queue.Empty:
                return
            self._mailbox.generation = max(self._mailbox.generation, generation)
            try:
                self._send(self._mailbox.post(body, CONTROLLER, now))
            except MailboxFull as error:
                self._failed(error, f"{type(body).__name__} is not reported")

    def _send(self, envelope: Envelope) -> None:
        """Send an envelope at the end of this turn, in one frame with all others of it.

        One that cannot be encoded must not keep back those behind it; it is given up in time.
        """
        try:
            self._leaving.append(encode(envelope))
        except WireError as error:
            self._failed(error, f"{type(envelope.body).__name__} is not sent")

    def _flush(self, socket: DealerSocket) -> None:
        leaving, self._leaving = self._leaving, []
        for frame in pack(leaving):
            socket.send(frame)

    def _open(self, frame: bytes) -> None:
        try:
            messages = unpack(frame)
        except WireError as error:
            self._mailbox.refused[type(error).__name__] += 1
            return
        for message in messages:
            self._take(message)

    def _take(self, message: msgspec.Raw) -> None:
        """Handle one message. No error that it causes may keep this rank from the next one."""
        try:
            envelope = decode(message)
        except WireError as error:
            self._mailbox.refused[type(error).__name__] += 1
            return
        taken = self._mailbox.take(envelope, time.monotonic())
        if taken.reply is not None:
            self._send(taken.reply)
        if not taken.deliver:
            return
        try:
            self._hear(envelope)
        except Exception as error:
            self._failed(
                error, f"{type(envelope.body).__name__} of generation {envelope.generation} was heard and failed"
            )
        if envelope.number:
            self._send(self._mailbox.acknowledge(envelope))

    def _failed(self, error: Exception, what: str) -> None:
        self.failures[type(error).__name__] += 1
        if self.failures[type(error).__name__].bit_count() == 1:  # the 1st, 2nd, 4th...: a flood does not fill the log
            count = self.failures.total()
            _log.error("%s (failure %d of the control thread): %s", what, count, error, exc_info=error)


def _end_process(text: str) -> NoReturn:
    """End this process at once, whatever its train thread is in. Its agent reports the exit."""
    with contextlib.suppress(Exception):
        print(f"midstep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the rank's log
    os._exit(os.EX_SOFTWARE)
