"""The asyncio client of the controller: one mailbox, one dealer socket, one timer.

Agents and platforms are built on it. They post reports and are handed commands; numbers, resends and
acknowledgements happen here.

libzmq connects again by itself, but not where a key was refused, nor at another controller's endpoint: `Absence` does
that. A controller that stands by says so, and where the one is that leads. Training continues while there is no
controller; only after `leave_s` a node gives the job up. A proxy (`protocol/proxied.py`) gives signs of life: one that
falls silent is left for another endpoint, and is looked for again later.
"""

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from .codec import decode, encode, pack, unpack
from .compat import within
from .discovery import LOOKUP_EVERY_S, LOOKUP_S, Lookup, each_address, split
from .errors import ConfigurationError, ForeignVersion, MailboxFull, WireError
from .mailbox import Mailbox, acknowledged_after
from .messages import Ack, ControllersListed, Envelope, Message
from .proxied import SIGN_OF_LIFE, SILENT_S
from .transport import DealerSocket, Received
from .types import CONTROLLER

_log = logging.getLogger(__name__)
LOOK_S = 0.25
CONNECT_AGAIN_S = 3.0  # at the only endpoint
NEXT_S = 0.75  # at the next one of several: on a slow link a handshake takes half of that
NEXT_MAX_S = 3.0  # twice as long in each turn, up to this: a machine may be too busy for any handshake in less
RESOLVE_S = 5.0  # for a name server to say which addresses there are
RETURN_S = 30.0  # to a proxy that was left, or had not been there, if it listens
REACH_S = 1.0


class ControllerLink:
    """Talks to the controller for one address. Belongs to the running loop.

    `on_command` gets each envelope once; it is acknowledged before, since a command lost with this process is
    noticed by the process's end. `on_new_controller` is called when a controller is heard for the first time,
    or a new one. `on_acknowledged` gets the number of each report that the controller has made durable. `on_foreign`
    is called when what answers speaks another version of the protocol, and no controller was ever understood: one that
    takes over in a running job is waited out.
    `lookup` is asked while the controller is silent, and the socket follows it.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        socket: DealerSocket,
        *,
        on_command: Callable[[Envelope], None],
        on_new_controller: Callable[[], None],
        on_acknowledged: Callable[[int], None] = lambda number: None,
        on_foreign: Callable[[ForeignVersion], None] = lambda error: None,
        lookup: Lookup = lambda: None,
    ) -> None:
        self.mailbox = mailbox
        self._socket = socket
        self._on_command = on_command
        self._on_new_controller = on_new_controller
        self._on_acknowledged = on_acknowledged
        self._on_foreign = on_foreign
        self._has_understood = False
        self._lookup = lookup
        self._lookup_failure = ""
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._next_lookup = self._loop.call_later(LOOKUP_S, self._follow)
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: list[bytes] = []  # what this turn of the loop has for the controller
        self._acks: list[bytes] = []  # acknowledgements that wait for something to leave with
        self._ack_s = 0.0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._turned_away: str | None = None
        self._proxy_s: float | None = None  # when a proxy gave its last sign of life; None: there is none on this way
        self.listed: tuple[str, ...] = ()  # where the job's controllers listen, as one of them said last
        self._quiet = asyncio.Event()  # nothing waits to be acknowledged
        self._quiet.set()
        socket.attach(self._loop, self._received)

    @property
    def endpoint(self) -> str:
        """The endpoint at which the controller is believed to listen."""
        return self._socket.endpoint

    @property
    def connected(self) -> bool:
        """True while there is a connection to a controller, and not to one that stands by, nor to a silent proxy."""
        silent = self._proxy_s is not None and self._loop.time() - self._proxy_s > SILENT_S
        return self._socket.connected and self._turned_away is None and not silent

    @property
    def proxied(self) -> bool:
        """True where a proxy is at the present endpoint."""
        return self._proxy_s is not None

    @property
    def turned_away(self) -> str | None:
        """Where the controller leads, if the one at the present endpoint stands by; empty: it does not know."""
        return self._turned_away

    def connect_to(self, endpoint: str) -> None:
        """Make the connection again, here or elsewhere. Raises ConfigurationError."""
        if self._closed:
            return
        self._turned_away = self._proxy_s = None
        if endpoint == self.endpoint:
            self._socket.connect_again()
        else:
            self._socket.move_to(endpoint)

    def post(self, body: Message, *, reliable: bool = True) -> int | None:
        """Send a report to the controller; a reliable one until it is acknowledged. Return its number.

        None: it is not sent, as too many wait for a controller, or this link is closed.
        """
        if self._closed:
            return None
        try:
            envelope = self.mailbox.post(body, CONTROLLER, time.monotonic(), reliable=reliable)
        except MailboxFull as error:
            # Thousands of unacknowledged reports: there has been no controller for long. NodeJoined tells the next one
            # what runs here.
            _log.error("a %s is not sent: %s", type(body).__name__, error)
            return None
        self._send(envelope)
        self._schedule()
        return envelope.number

    def sign(self) -> None:
        """Show that this node lives: one byte, where a heartbeat would say what was said just before."""
        if not self._closed:
            self._socket.send(SIGN_OF_LIFE)

    def expect_ranks(self, world_size: int) -> None:
        """Speak as suits a job of so many ranks: patiently, and in few frames."""
        self.mailbox.expect_ranks(world_size)
        self._ack_s = acknowledged_after(world_size)

    async def flush(self, limit_s: float) -> bool:
        """Wait until all that was posted is acknowledged, or given up; False when `limit_s` passes first."""
        try:
            await within(limit_s, self._quiet.wait())
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop talking, after what was said. Idempotent."""
        self._flush()
        self._closed = True
        self._next_lookup.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    def _send(self, envelope: Envelope) -> None:
        try:
            self._leave(encode(envelope))
        except WireError as error:
            _log.error("a %s is lost: %s", type(envelope.body).__name__, error)

    def _leave(self, message: bytes) -> None:
        """Send a message at the end of this turn of the loop, in one frame with all others of it."""
        if not self._leaving:
            self._loop.call_soon(self._flush)
        self._leaving.append(message)

    def _acknowledge(self, envelope: Envelope) -> None:
        answer = self.mailbox.acknowledge(envelope)
        if not self._ack_s:
            self._send(answer)
            return
        self._acks.append(encode(answer))
        if self._ack_timer is None:
            self._ack_timer = self._loop.call_later(self._ack_s, self._flush)

    def _flush(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        leaving = [*self._acks, *self._leaving]
        self._acks, self._leaving = [], []
        if not self._closed:
            for frame in pack(leaving):
                self._socket.send(frame)

    def _follow(self) -> None:
        """Look a silent controller up, and connect to where it is: another process may have its old port by now."""
        silent_s = self._loop.time() - self._heard_s
        self._next_lookup = self._loop.call_later(max(LOOKUP_EVERY_S, LOOKUP_S - silent_s), self._follow)
        if silent_s < LOOKUP_S:
            return
        try:
            endpoint = self._lookup()
            if endpoint is None or endpoint == self.endpoint:
                return
            self._socket.move_to(endpoint)
        except ConfigurationError as error:
            if str(error) != self._lookup_failure:
                _log.warning("the controller cannot be looked up: %s", error)
            self._lookup_failure = str(error)
        else:
            _log.warning("the controller listens at %s now", endpoint)

    def _received(self, batch: list[Received]) -> None:
        self._heard_s = self._loop.time()
        for frame in batch:
            if frame.data == SIGN_OF_LIFE:
                self._proxy_s = self._heard_s
                continue
            try:
                messages = unpack(frame.data)
            except WireError as error:
                self._refuse(error)
                continue
            for message in messages:
                if self._closed:
                    return
                self._open(message)
        self._schedule()

    def _open(self, message: msgspec.Raw) -> None:
        try:
            envelope = decode(message)
        except WireError as error:
            self._refuse(error)
            if isinstance(error, ForeignVersion) and not self._has_understood:
                self._on_foreign(error)
            return
        self._has_understood = True
        self._take(envelope)

    def _refuse(self, error: WireError) -> None:
        self.mailbox.refused["malformed"] += 1
        _log.warning("refused: %s", error)

    def _learn(self, told: ControllersListed) -> None:
        """Note where the controllers are. One that stands by has no term, and nothing else to say."""
        self.listed = tuple(filter(_is_endpoint, told.endpoints))
        if told.serves:
            self._turned_away = None
            return
        if self._turned_away is None:
            _log.info("the controller at %s stands by; %s leads", self.endpoint, told.leads or "none that it knows of")
        self._turned_away = told.leads if _is_endpoint(told.leads) else ""

    def _take(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, ControllersListed):
            self._learn(envelope.body)
            return
        taken = self.mailbox.take(envelope, time.monotonic())
        if taken.reply is not None:
            self._send(taken.reply)
        if taken.new_session and envelope.sender == CONTROLLER:
            self._on_new_controller()
        if isinstance(envelope.body, Ack) and taken.refused is None:
            self._on_acknowledged(envelope.body.number)
        if taken.deliver:
            self._turned_away = None
            if envelope.number:
                self._acknowledge(envelope)
            self._on_command(envelope)

    def _resend(self) -> None:
        self._timer = None
        now = time.monotonic()
        for envelope in self.mailbox.due(now):
            self._send(envelope)
        for envelope in self.mailbox.undeliverable(now):
            _log.error("a %s was not acknowledged, and is not sent any more", type(envelope.body).__name__)
        self._schedule()

    def _schedule(self) -> None:
        due_s = self.mailbox.next_due()
        if due_s is None:
            self._quiet.set()
        else:
            self._quiet.clear()
        if self._closed or due_s is None:
            return
        if self._timer is not None:
            if self._timer.when() <= self._loop.time() + max(0.0, due_s - time.monotonic()):
                return
            self._timer.cancel()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._timer = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._resend)


def first_listening(endpoints: Sequence[str]) -> str | None:
    """Return the first address at which anything listens, of all that the endpoints stand for. Blocks."""
    for each in each_address(endpoints):
        with contextlib.suppress(OSError), socket.create_connection(split(each), REACH_S):
            return each
    return None


def _is_endpoint(text: str) -> bool:
    try:
        split(text)
    except ConfigurationError:
        return False
    return True


class WatchedLink(Protocol):
    """A connection that `Absence` watches, with what it has said of controllers; as in ControllerLink."""

    listed: tuple[str, ...]

    @property
    def endpoint(self) -> str:
        """Where a controller or a proxy is believed to listen."""

    @property
    def connected(self) -> bool:
        """True while there is a way to the controller."""

    @property
    def turned_away(self) -> str | None:
        """Where the controller leads, if the one here stands by."""

    @property
    def proxied(self) -> bool:
        """True where a proxy is here."""

    def connect_to(self, endpoint: str) -> None:
        """Make the connection again, here or elsewhere. Raises ConfigurationError."""


class Absence:
    """Watches one link in the running loop. `on_leave` is called once, when no controller was there for `leave_s`.

    A link without one of its proxies on the way goes there once it listens.
    """

    def __init__(
        self,
        link: WatchedLink,
        endpoints: Sequence[str],
        on_leave: Callable[[], None] = lambda: None,
        *,
        follows: bool = True,
        proxies: Sequence[str] = (),
    ) -> None:
        """`endpoints`: where controllers may listen; all their addresses are tried in turn, the present one last.

        `follows`: go where a controller says that others listen, too. `proxies`: are tried before controllers.
        """
        self.leave_s = float("inf")
        self._link = link
        self._proxies = tuple(proxies)
        self._endpoints = (*self._proxies, *endpoints)
        self._follows = follows
        self._next: list[str] = []  # addresses that are to be tried in this turn
        self._again_s = self._next_s = NEXT_S
        self._resolving: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None
        self._return_s = 0.0  # when a proxy is to be looked for
        self._on_leave = on_leave
        self._loop = asyncio.get_running_loop()
        self._here_s = self._tried_s = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._timer.cancel()
        for task in (self._resolving, self._returning):
            if task is not None:
                task.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        now = self._loop.time()
        if self._link.connected:
            self._here_s = self._tried_s = now
            self._next.clear()
            self._next_s = NEXT_S
            self._return(now)
        elif now - self._here_s > self.leave_s:
            self._timer.cancel()
            self._on_leave()
        elif self._follows and self._link.turned_away not in {None, "", self._link.endpoint}:
            self._connect(str(self._link.turned_away), now)
        elif not self._next:
            if self._resolving is None:
                self._resolving = self._loop.create_task(self._resolve())
        elif now - self._tried_s >= self._again_s or self._link.proxied:  # one that was here is not waited for
            self._connect(self._next.pop(0), now)

    def _return(self, now: float) -> None:
        """Look for a proxy where there is none on the way; after a while, as its nodes do not all come at once."""
        if not self._proxies or self._link.proxied:
            self._return_s = 0.0
        elif not self._return_s:
            self._return_s = now + RETURN_S * random.uniform(0.5, 1.0)
        elif now >= self._return_s and self._returning is None:
            self._returning = self._loop.create_task(self._return_to_proxy())

    async def _return_to_proxy(self) -> None:
        try:
            proxy = await asyncio.to_thread(first_listening, self._proxies)
            if proxy is not None and self._link.connected:
                self._connect(proxy, self._loop.time())
        finally:
            self._returning, self._return_s = None, 0.0

    def _connect(self, endpoint: str, now: float) -> None:
        self._tried_s = now
        try:
            self._link.connect_to(endpoint)
        except ConfigurationError as error:
            _log.warning("%s", error)

    async def _resolve(self) -> None:
        """Begin a turn: look up where controllers may be by now."""
        try:
            known = self._endpoints
            if self._follows:
                known = tuple(dict.fromkeys((*known, *self._link.listed)))
            found = known
            with contextlib.suppress(TimeoutError):
                found = await within(RESOLVE_S, asyncio.to_thread(each_address, known))
            others = [each for each in found if each != self._link.endpoint]
            self._next = [*others, *(each for each in found if each == self._link.endpoint)]
            self._again_s = self._next_s if others else CONNECT_AGAIN_S
            self._next_s = min(2 * self._next_s, NEXT_MAX_S)
        finally:
            self._resolving = None
