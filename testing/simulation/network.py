"""A bad network between the product's own mailboxes: late, lost, twice, out of order."""

import math
import random
from collections.abc import Callable

from ...protocol.mailbox import Mailbox
from ...protocol.messages import Envelope, Message
from ...protocol.types import CONTROLLER
from .invariants import Invariant
from .timeline import Timeline

RESENDS_S = 15.0


class Network:
    """Carries envelopes. `loss` and `twice` are probabilities, `delay_s` is the mean of an exponential delay."""

    def __init__(self, timeline: Timeline, chance: random.Random, *, delay_s: float, loss: float, twice: float) -> None:
        self._timeline = timeline
        self._chance = chance
        self._delay_s, self._loss, self._twice = delay_s, loss, twice
        self._worse: tuple[float, float, float] = (0.0, 0.0, 0.0)  # until when, loss, delay

    def worsen(self, until_s: float, *, loss: float, delay_s: float) -> None:
        """Be worse for a while."""
        self._worse = (until_s, loss, delay_s)

    @property
    def has_delivered(self) -> bool:
        """Whether everything that was said should have arrived by now, resends included."""
        return self._timeline.now > self._worse[0] + RESENDS_S or not self._worse[0]

    def carry(self, envelope: Envelope, deliver: Callable[[Envelope], None]) -> None:
        """Hand an envelope to `deliver`, later: never, once or twice."""
        chance, loss, delay_s = self._chance, self._loss, self._delay_s
        if self._worse[0] > self._timeline.now:
            _, loss, delay_s = self._worse
        if loss and chance.random() < loss:
            return
        self._timeline.after(-delay_s * math.log(1.0 - chance.random()), lambda: deliver(envelope))
        if self._twice and chance.random() < self._twice:
            self._timeline.after(-delay_s * math.log(1.0 - chance.random()), lambda: deliver(envelope))


class Endpoint:
    """A mailbox with a clock. `transmit` puts an envelope on the wire; `take` says whether it has been taken in."""

    def __init__(
        self,
        mailbox: Mailbox,
        timeline: Timeline,
        *,
        transmit: Callable[[Envelope], None],
        take: Callable[[Envelope], bool],
        complain: Callable[[Invariant, str], None],
        new_session: Callable[[Envelope], None] | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.open = True
        self.deaf = False  # goes on sending, and takes nothing in
        self._timeline = timeline
        self._transmit = transmit
        self._take = take
        self._complain = complain
        self._term = 0  # the highest that was ever taken in
        self._taken: set[tuple[str, int, int]] = set()
        self._new_session = new_session
        self._due_s = math.inf

    def close(self) -> None:
        """Be gone."""
        self.open = False

    def post(self, body: Message, receiver: str) -> None:
        """Send a message until it is acknowledged."""
        if self.open:
            self._transmit(self.mailbox.post(body, receiver, self._timeline.now))
            self._plan()

    def hurry(self) -> None:
        """Send again soon what could not arrive for a while."""
        self.mailbox.hurry(self._timeline.now)
        self._plan()

    def receive(self, envelope: Envelope) -> None:
        """An envelope has arrived."""
        if not self.open or self.deaf:
            return
        taken = self.mailbox.take(envelope, self._timeline.now)
        if taken.reply is not None:
            self._transmit(taken.reply)
        if taken.new_session and self._new_session is not None:
            self._new_session(envelope)
        if taken.deliver:
            self._judge(envelope)
        if taken.deliver and self._take(envelope) and self.open:
            self._transmit(self.mailbox.acknowledge(envelope))
        self._plan()

    def _judge(self, envelope: Envelope) -> None:
        """Complain of what must not have got past the mailbox."""
        if envelope.sender == CONTROLLER and envelope.term < self._term:
            what = f"{envelope.receiver} follows a {type(envelope.body).__name__} of term {envelope.term}"
            self._complain(Invariant.ONE_BRAIN, f"{what} after one of term {self._term}")
        if envelope.sender == CONTROLLER:
            self._term = envelope.term
        key = (envelope.sender, envelope.session, envelope.number)
        if envelope.number and key in self._taken:
            self._complain(Invariant.AT_MOST_ONCE, f"{envelope.receiver} takes in {envelope} a second time")
        self._taken.add(key)

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
