"""A bad network between the product's own mailboxes: late, lost, twice, out of order."""

import math
import random
from collections.abc import Callable

from ..protocol.mailbox import Mailbox
from ..protocol.messages import Envelope, Message
from .timeline import Timeline


class Network:
    """Carries envelopes. `loss` and `twice` are probabilities, `delay_s` is the mean of an exponential delay."""

    def __init__(self, timeline: Timeline, chance: random.Random) -> None:
        self._timeline = timeline
        self._chance = chance
        self.delay_s = chance.choice((0.0002, 0.001, 0.01))
        self.loss = chance.choice((0.0, 0.0, 0.01, 0.05))
        self.twice = chance.choice((0.0, 0.02, 0.2))

    def carry(self, envelope: Envelope, deliver: Callable[[Envelope], None]) -> None:
        """Hand an envelope to `deliver`, later: never, once or twice."""
        if self._chance.random() < self.loss:
            return
        for _ in range(2 if self._chance.random() < self.twice else 1):
            self._timeline.after(self._chance.expovariate(1 / self.delay_s), lambda: deliver(envelope))


class Endpoint:
    """A mailbox with a clock. `transmit` puts an envelope on the wire; `take` says whether it has been taken in."""

    def __init__(
        self,
        mailbox: Mailbox,
        timeline: Timeline,
        *,
        transmit: Callable[[Envelope], None],
        take: Callable[[Envelope], bool],
        new_session: Callable[[Envelope], None] | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.open = True
        self._timeline = timeline
        self._transmit = transmit
        self._take = take
        self._new_session = new_session
        self._due_s = math.inf

    def post(self, body: Message, receiver: str) -> None:
        """Send a message until it is acknowledged."""
        if self.open:
            self._transmit(self.mailbox.post(body, receiver, self._timeline.now))
            self._plan()

    def receive(self, envelope: Envelope) -> None:
        """An envelope has arrived."""
        if not self.open:
            return
        taken = self.mailbox.take(envelope, self._timeline.now)
        if taken.reply is not None:
            self._transmit(taken.reply)
        if taken.new_session and self._new_session is not None:
            self._new_session(envelope)
        if taken.deliver and self._take(envelope) and self.open:
            self._transmit(self.mailbox.acknowledge(envelope))
        self._plan()

    @property
    def quiet(self) -> bool:
        """Whether everything has been acknowledged."""
        return self.mailbox.next_due() is None

    def _plan(self) -> None:
        due_s = self.mailbox.next_due()
        if due_s is not None and due_s < self._due_s:
            self._due_s = due_s
            self._timeline.after(due_s - self._timeline.now, self._resend)

    def _resend(self) -> None:
        self._due_s = math.inf
        if not self.open:
            return
        for envelope in self.mailbox.due(self._timeline.now):
            self._transmit(envelope)
        self.mailbox.undeliverable(self._timeline.now)
        self._plan()
