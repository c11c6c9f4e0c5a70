"""The controller's end of all connections: bytes to believed, fresh messages, and orders to bytes.

It joins transport, codec, admission, mailbox and routes, and leaves one promise to its user: what `receive` hands out
is acknowledged only by `acknowledge`, that is after it is durable.

A node is spoken to once: what its ranks are ordered in a turn leaves as one message (`protocol/rank_relay.py`), and so
does what it is to start.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from ..protocol import codec
from ..protocol import codec as frames
from ..protocol.errors import ForeignVersion, MailboxFull, WireError
from ..protocol.identities import OPERATOR_PREFIX
from ..protocol.incidents import ProxyStatus
from ..protocol.keys import ServerKeys
from ..protocol.mailbox import Mailbox, SenderMemory, acknowledged_after
from ..protocol.messages import (
    NEVER_JOURNALED,
    Ack,
    Command,
    EnrolmentRequested,
    Envelope,
    Message,
    RanksReported,
)
from ..protocol.proxied import SIGN_OF_LIFE
from ..protocol.transport import Received, RouterSocket
from ..protocol.types import node_address, rank_of
from .admission import believed_of, refusal
from .endpoints.proxied_router import ProxiedRouter
from .routes import Routes, TurnOrders

RECEIVE_LIMIT = 1000  # messages a turn, and what their frames have beyond it
FRAMES_AT_ONCE = 16
READ_FIRST_S = 1.0  # for so long nothing is sent again while something is to be read
MOST_FOREIGN = 1024  # connections of another version that are logged once each
UNCONFIRMED_LIMIT = 10_000  # messages taken in and not yet durable; more are dropped and come again
UNCONFIRMED_PER_RANK = 2  # a job starts with a word of each rank's process and one of its node: all may come at once

_log = logging.getLogger(__name__)


class Arrival(msgspec.Struct, frozen=True):
    """A believed, fresh message, and the connection that it came through."""

    envelope: Envelope
    connection: str


class Wire:
    """Sends and receives for one controller. Never blocks. What is sent leaves with `flush`."""

    def __init__(
        self,
        router: RouterSocket,
        mailbox: Mailbox,
        routes: Routes,
        world_size: int,
        keys: ServerKeys | None = None,
    ) -> None:
        """`router` stays its creator's to close. `keys`: list which nodes may come through a proxy; None: none may."""
        self._proxied = None if keys is None else ProxiedRouter(router, keys)
        self._router: RouterSocket | ProxiedRouter = self._proxied or router
        self._mailbox = mailbox
        self._routes = routes
        self._world_size = world_size
        self._unconfirmed, self._most_unconfirmed = 0, max(UNCONFIRMED_LIMIT, UNCONFIRMED_PER_RANK * world_size)
        self._out_of_reach: dict[str, set[str]] = {}  # connections that are not there yet, and whom they lead to
        self._leaving: dict[str, list[bytes]] = {}  # what this turn has for each connection
        self._orders = TurnOrders(routes)  # what it has for ranks, and what is to start: not in a message yet
        self._ack_s = acknowledged_after(world_size)
        self._acks: dict[str, list[bytes]] = {}  # acknowledgements that wait for an order to the same connection
        self._acks_due: deque[tuple[float, str]] = deque()  # when they leave without one
        self._now = 0.0  # of this turn
        self.heard_only_beats = False  # when it received last
        self.alive: list[str] = []  # connections on which nothing but a sign of life came then
        self._refused: Counter[str] = Counter()
        self._foreign: set[str] = set()  # connections whose version was logged
        self._resend_by_s = 0.0
        self._from_operators: list[Received] = []
        self._set_aside: deque[Received] = deque()

    @property
    def pending(self) -> bool:
        """Return whether something has arrived and was not received. See `protocol.transport`."""
        return bool(self._set_aside) or self._router.pending

    @property
    def refused(self) -> dict[str, int]:
        """Messages that were refused so far, by reason."""
        return dict(self._router.refused + self._mailbox.refused + self._refused)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when something may have arrived."""
        return self._router.fileno()

    def receive(self, now: float) -> list[Arrival]:
        """Return fresh messages that have arrived, a bounded number; look at `pending` for more."""
        arrivals: list[Arrival] = []
        count, self._now, self.alive = 0, now, []
        while count < RECEIVE_LIMIT and (batch := self._next_frames()):
            for received in batch:
                if received.identity.startswith(OPERATOR_PREFIX):
                    self._from_operators.append(received)  # those are no frames of envelopes
                    count += 1
                elif received.data == SIGN_OF_LIFE:
                    self.alive.append(received.identity)
                    count += 1
                else:
                    count += self._open(received, now, arrivals)
        beats = len(self.alive) + sum(isinstance(each.envelope.body, NEVER_JOURNALED) for each in arrivals)
        self.heard_only_beats = 0 < count == beats
        for connection in [each for each in self._out_of_reach if self._router.knows(each)]:
            for receiver in self._out_of_reach.pop(connection):
                self._mailbox.reached(receiver, now)
        return arrivals

    def set_aside(self) -> None:
        """Read what has come, for `receive`, so that operators can be answered while the journal is loaded."""
        while len(self._set_aside) < UNCONFIRMED_LIMIT and (batch := self._router.receive(limit=FRAMES_AT_ONCE)):
            for received in batch:
                kept = self._from_operators if received.identity.startswith(OPERATOR_PREFIX) else self._set_aside
                kept.append(received)

    def _next_frames(self) -> list[Received]:
        if not self._set_aside:
            return self._router.receive(limit=FRAMES_AT_ONCE)
        return [self._set_aside.popleft() for _ in range(min(FRAMES_AT_ONCE, len(self._set_aside)))]

    def _open(self, received: Received, now: float, arrivals: list[Arrival]) -> int:
        """Admit the messages of a frame one by one; return how many it has."""
        try:
            messages = frames.unpack(received.data)
        except WireError as error:
            self.refuse(type(error).__name__, received.identity)
            return 1
        for message in messages:
            try:
                envelope = codec.decode(message)
            except ForeignVersion as error:
                self._turn_away(error, received.identity, now)
                continue
            except WireError as error:
                self.refuse(type(error).__name__, received.identity)
                continue
            believed = self._admit(received.identity, envelope, now)
            if believed is not None:
                arrivals.append(Arrival(believed, received.identity))
        return len(messages)

    def _turn_away(self, error: ForeignVersion, connection: str, now: float) -> None:
        """Answer a message of another version with any of this one, by which its sender sees what is wrong."""
        self.refuse(type(error).__name__, connection)
        if connection not in self._foreign:
            if len(self._foreign) >= MOST_FOREIGN:
                self._foreign.clear()
            self._foreign.add(connection)
            _log.warning("%s is turned away: %s", connection, error)
        self._transmit(self._mailbox.post(Ack(session=0, number=0), connection, now, reliable=False), connection)

    def from_operators(self) -> list[Received]:
        """Return what operators on other machines have sent, once."""
        received, self._from_operators = self._from_operators, []
        return received

    def answer_operator(self, connection: str, data: bytes) -> None:
        """Send an answer to an operator; nothing happens if it is gone."""
        self._router.send(connection, data)

    def _admit(self, connection: str, envelope: Envelope, now: float) -> Envelope | None:
        """Return what is fresh and believed of an envelope."""
        reason = refusal(connection, envelope, self._world_size, self._routes)
        if reason is not None:
            self.refuse(reason, connection)
            return None
        if self._unconfirmed >= self._most_unconfirmed and not isinstance(envelope.body, NEVER_JOURNALED):
            self.refuse("the journal is behind", connection)  # not taken, so its sender sends it again
            return None
        taken = self._mailbox.take(envelope, now)
        if taken.reply is not None:
            self._transmit(taken.reply, connection)
        if isinstance(envelope.body, EnrolmentRequested):
            self._mailbox.forget_sender(envelope.sender)  # it has this one thing to say
        if not taken.deliver:
            return None
        if isinstance(envelope.body, RanksReported):
            believed = self._believed(envelope, envelope.body)
            if believed is None:  # acknowledged, or the node would say it again and again
                self._transmit(self._mailbox.acknowledge(envelope), connection)
                return None
            envelope = believed
        if envelope.number:
            self._unconfirmed += 1
        return envelope

    def _believed(self, envelope: Envelope, body: RanksReported) -> Envelope | None:
        """Admit the reports of a node's ranks one by one. None: not one of them is believed."""
        believed, refused = believed_of(body, envelope.sender, self._world_size, self._routes.placement)
        for reason in refused:
            self.refuse(reason, envelope.sender)
        if believed is body or believed is None:
            return None if believed is None else envelope
        return msgspec.structs.replace(envelope, body=believed)

    def acknowledge(self, arrival: Arrival) -> None:
        """Tell the sender that its message is durable."""
        envelope = arrival.envelope
        if envelope.number:
            self._unconfirmed -= 1
            self._transmit(self._mailbox.acknowledge(envelope), arrival.connection, wait_s=self._ack_s)

    def send(self, receiver: str, body: Command, generation: int, now: float) -> None:
        """Send a command, again and again until it is acknowledged or forgotten."""
        self._mailbox.generation, self._now = generation, now
        if self._orders.take(receiver, body, generation):
            return
        for message in self._orders.close(receiver):
            self._post(receiver, message)
        self._post(receiver, body)

    def _post(self, receiver: str, body: Command) -> None:
        now = self._now
        try:
            envelope = self._mailbox.post(body, receiver, now)
        except MailboxFull:
            _log.exception("%s for %s is not sent", type(body).__name__, receiver)
            return
        self._forward(envelope)

    def answer(self, arrival: Arrival, body: Message, now: float) -> None:
        """Send an answer over the connection of a request, once: who misses it asks again."""
        envelope = self._mailbox.post(body, arrival.envelope.sender, now, reliable=False)
        self._transmit(envelope, arrival.connection)

    def restore(self, taken_in: Iterable[tuple[str, SenderMemory]]) -> None:
        """Remember what earlier controllers took in, so that nothing is taken in twice."""
        for sender, memory in taken_in:
            self._mailbox.recall(sender, memory)

    def forget(self, receiver: str) -> None:
        """Stop resending to a receiver. What an agent has for one of its ranks is the agent's to forget."""
        rank = rank_of(receiver)
        if rank is None:
            self._orders.forget_node(receiver)
            self._mailbox.forget(receiver)
        else:
            self._orders.forget(rank)

    def resend(self, now: float) -> None:
        """Send again what is due, and give up what is hopeless."""
        if self._router.pending and now < self._resend_by_s:
            return  # acknowledgements may lie unread
        self._resend_by_s = now + READ_FIRST_S
        for envelope in self._mailbox.due(now):
            self._forward(envelope)
        for envelope in self._mailbox.undeliverable(now):
            _log.error(
                "%s for %s was never acknowledged and is given up",
                type(envelope.body).__name__,
                envelope.receiver,
            )

    def hurry(self, now: float) -> None:
        """Send again soon what could not arrive while most nodes were silent."""
        self._mailbox.hurry(now)

    def next_due(self) -> float | None:
        """Return when `resend` or `flush` has something to do; None when everything is acknowledged."""
        times = (self._mailbox.next_due(), self._acks_due[0][0] if self._acks_due else None)
        return min((moment for moment in times if moment is not None), default=None)

    def _forward(self, envelope: Envelope) -> None:
        connection = self._routes.connection(envelope.receiver)
        if connection is not None:  # else it waits: the route is learned from its agent
            self._transmit(envelope, connection)

    def _transmit(self, envelope: Envelope, connection: str, *, wait_s: float = 0.0) -> None:
        try:
            data = codec.encode(envelope)
        except WireError:
            _log.exception("%s for %s cannot be sent", type(envelope.body).__name__, envelope.receiver)
            return
        if wait_s > 0:
            if connection not in self._acks:
                self._acks_due.append((self._now + wait_s, connection))
            self._acks.setdefault(connection, []).append(data)
        elif self._router.knows(connection):
            self._leaving.setdefault(connection, []).append(data)
        else:
            self._out_of_reach.setdefault(connection, set()).add(envelope.receiver)

    def flush(self) -> None:
        """Send what the turn has for each connection, in as few frames as hold it. Called before each wait."""
        for connection, message in self._orders.flush():
            self._post(connection, message)
        while self._acks_due and self._acks_due[0][0] <= self._now:
            self._leaving.setdefault(self._acks_due.popleft()[1], [])
        leaving, self._leaving = self._leaving, {}
        for connection, messages in leaving.items():
            for frame in frames.pack((*self._acks.pop(connection, ()), *messages)):
                self._router.send(connection, frame)  # what is not taken is counted there, and sent again

        if self._proxied is not None:
            self._proxied.flush()

    def proxies(self) -> tuple[ProxyStatus, ...]:
        """Return which proxies speak for nodes."""
        return () if self._proxied is None else self._proxied.proxies()

    def tolerates_silence(self, node: str) -> bool:
        """Say whether a node may be silent because the proxy is that it speaks through."""
        return self._proxied is not None and self._proxied.tolerates_silence(node_address(node))

    def refuse(self, reason: str, connection: str) -> None:
        """Count what is not believed."""
        self._refused[reason] += 1
        _log.debug("refused a message from %s: %s", connection, reason)
