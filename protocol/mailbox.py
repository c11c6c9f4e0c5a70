"""Reliable messages over a lossy wire: numbers, acknowledgements, resends, and each message at most once.

One mailbox per process. It holds no clock and does no I/O: time is an argument, and the owner of the socket sends
what comes out and hands in what arrived. So losses, duplicates and reorderings can be tried out exactly, from a seed.

Numbers run per receiver, without gaps: that is what lets a receiver tell every new message from every repeated one
in bounded memory (see `SenderMemory`). Order is not promised: commands carry their generation.
"""

import heapq
import math
from collections import Counter

import msgspec

from .codec import PROTOCOL_VERSION
from .compat import StrEnum
from .errors import ConfigurationError, MailboxFull
from .messages import OF_A_GENERATION, Ack, Envelope, Message, OrderRanks
from .types import CONTROLLER, DETECTOR_PREFIX

MAX_SENDERS = 65_536
DETECTOR_QUIET_S = 30.0  # then an earlier session of a detector is believed again; its resends come much more often
_BACKOFF = 2.0
RETRY_S = 0.5
RETRY_PER_RANK_S = 0.0002  # what a controller takes to answer one of all ranks that report at the same time
ACK_PER_RANK_S = 0.00004  # a fifth of that
ACK_MAX_S = 0.5
ACK_LEAST_S = 0.02
WINDOW = 4096
_MASK = (1 << WINDOW) - 1


class Refusal(StrEnum):
    """Why an envelope was not delivered. These are the keys of `Mailbox.refused`."""

    WRONG_JOB = "wrong job"
    WRONG_RECEIVER = "wrong receiver"
    OWN_ADDRESS = "own address"  # another process uses the name of this one
    NEGATIVE = "negative number"
    OLD_TERM = "old term"
    STALE_SESSION = "stale session"
    TOO_MANY_SENDERS = "too many senders"
    DUPLICATE = "duplicate"  # normal on a lossy wire
    UNKNOWN_ACK = "acknowledges another session"


class Taken(msgspec.Struct, frozen=True):
    """The fate of an envelope that arrived.

    `reply`, if there is one, must be sent now. `new_session`: the first word of this session of its sender, so the
    sender is new or has been restarted.
    """

    deliver: bool
    refused: Refusal | None = None
    reply: Envelope | None = None
    new_session: bool = False


class Outgoing:
    """A message that is not acknowledged yet."""

    __slots__ = ("due_s", "envelope", "give_up_s", "posted_s", "sent_s", "wait_s")

    def __init__(self, envelope: Envelope, now: float, wait_s: float, give_up_s: float) -> None:
        self.envelope = envelope
        self.posted_s = self.sent_s = now
        self.wait_s = wait_s
        self.give_up_s = give_up_s
        self.due_s = now + wait_s


class SenderMemory:
    """The memory of one sender: its session, when it was heard, which of its last `WINDOW` numbers were taken.

    Bit i of `taken` and `acknowledged` stands for the number `highest - i`.
    """

    __slots__ = ("acknowledged", "heard_s", "highest", "session", "taken")

    def __init__(self, session: int) -> None:
        self.session = session
        self.heard_s = -math.inf  # by this process of the receiver
        self.highest = 0
        self.taken = 0
        self.acknowledged = 0

    def mark_taken(self, number: int) -> bool:
        """Remember `number`; False if it was known already."""
        ahead = number - self.highest
        if ahead > 0:
            shift = min(ahead, WINDOW)
            self.taken = (self.taken << shift) & _MASK | 1
            self.acknowledged = (self.acknowledged << shift) & _MASK
            self.highest = number
            return True
        bit = 1 << -ahead if -ahead < WINDOW else 0
        if not bit or self.taken & bit:
            return False
        self.taken |= bit
        return True

    def was_taken(self, number: int) -> bool:
        """Say whether `number` is known. What is older than the window is."""
        age = self.highest - number
        return age >= WINDOW or (age >= 0 and bool(self.taken >> age & 1))

    @classmethod
    def of(cls, session: int, highest: int, taken: int) -> "SenderMemory":
        """Return the memory of a receiver that has acknowledged all that it had taken."""
        made = cls(session)
        made.highest, made.taken, made.acknowledged = highest, taken, taken
        return made

    def mark_acknowledged(self, number: int) -> None:
        """Remember that a repeated `number` may be acknowledged at once."""
        age = self.highest - number
        if 0 <= age < WINDOW:
            self.acknowledged |= 1 << age

    def was_acknowledged(self, number: int) -> bool:
        """Say whether the message has been taken in. What is older than the window has been."""
        age = self.highest - number
        return age >= WINDOW or (age >= 0 and bool(self.acknowledged >> age & 1))


def retry_of(world_size: int) -> float:
    """Return after how long without an answer a message is sent again in a job of so many ranks.

    In a large one an answer takes its time while all ranks report at once, and what is said twice takes more of it.
    """
    return RETRY_S + RETRY_PER_RANK_S * world_size


def acknowledged_after(world_size: int) -> float:
    """Return how long an acknowledgement waits in a job of so many ranks, to leave with the next message for its peer.

    It spares a large job frames that hold nothing else. A small one is answered at once.
    """
    wait_s = min(ACK_PER_RANK_S * world_size, ACK_MAX_S)
    return wait_s if wait_s >= ACK_LEAST_S else 0.0


class Mailbox:
    """The reliable end of the wire of one process.

    `term` and `generation` are stamped on what is posted. What arrives from the controller raises them; the controller
    sets its own. Times are seconds on any clock that does not go back. Not thread-safe.
    """

    def __init__(
        self,
        *,
        job: str,
        address: str,
        session: int,
        retry_s: float = RETRY_S,
        retry_max_s: float = 5.0,
        give_up_s: float = 600.0,
        capacity: int = 10_000,
    ) -> None:
        if not 0 < retry_s <= retry_max_s or give_up_s <= 0 or capacity < 1:
            raise ConfigurationError(
                f"a mailbox needs 0 < retry_s <= retry_max_s, give_up_s > 0 and capacity >= 1, "
                f"not {retry_s}, {retry_max_s}, {give_up_s} and {capacity}."
            )
        self.job = job
        self.address = address
        self.session = session
        self.term = 0
        self.generation = 0
        self.refused: Counter[str] = Counter()
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._give_up_s = give_up_s
        self._capacity = capacity
        self._last_number: dict[str, int] = {}
        self._outgoing: dict[str, dict[int, Outgoing]] = {}  # by receiver, then number, in order of number
        self._outstanding = 0
        self._timetable: list[tuple[float, str, int]] = []  # a heap; entries that no longer hold are skipped
        self._give_up_from_s = math.inf  # nothing is given up before
        self._senders: dict[str, SenderMemory] = {}

    def expect_ranks(self, world_size: int) -> None:
        """Wait for as long as the answers in a job of so many ranks may take, before anything is sent again."""
        self._retry_s = max(self._retry_s, retry_of(world_size))
        self._retry_max_s = max(self._retry_max_s, self._retry_s)

    # --- sending ------------------------------------------------------------------------------------------------

    def post(self, body: Message, receiver: str, now: float, *, reliable: bool = True) -> Envelope:
        """Put a message into an envelope; the caller sends it at once.

        A reliable one is kept, and comes out of `due` until it is acknowledged or given up; the first time `retry_s`
        from now. An unreliable one (a heartbeat) has number 0 and is forgotten.

        Raises:
            MailboxFull: too much is unacknowledged, over all or for this receiver. Nothing was posted.
        """
        if not reliable:
            return self._envelope(body, receiver, 0)
        number = self._last_number.get(receiver, 0) + 1
        waiting = self._outgoing.setdefault(receiver, {})
        if waiting and isinstance(body, (*OF_A_GENERATION, OrderRanks)):
            self._outdate(waiting, body)
        if self._outstanding >= self._capacity:
            raise MailboxFull(
                f"{self._outstanding} messages of {self.address} are unacknowledged, the limit is {self._capacity}; "
                f"a {type(body).__name__} for {receiver} was not posted. Forget receivers that are gone."
            )
        if waiting and number - next(iter(waiting)) >= WINDOW:
            raise MailboxFull(
                f"{receiver} has not acknowledged message {next(iter(waiting))} and is {WINDOW} behind; "
                f"a {type(body).__name__} was not posted. Forget receivers that are gone."
            )
        self._last_number[receiver] = number
        outgoing = Outgoing(self._envelope(body, receiver, number), now, self._retry_s, now + self._give_up_s)
        waiting[number] = outgoing
        self._give_up_from_s = min(self._give_up_from_s, outgoing.give_up_s)
        self._outstanding += 1
        self._schedule(outgoing)
        return outgoing.envelope

    def behind(self, receiver: str) -> int:
        """Return how many messages a receiver has been sent since the first that it has not acknowledged."""
        waiting = self._outgoing.get(receiver)
        return self._last_number[receiver] - next(iter(waiting)) + 1 if waiting else 0

    def due(self, now: float) -> list[Envelope]:
        """Return what must be sent again now, with its age. The waits double from `retry_s` to `retry_max_s`."""
        ripe = []
        while self._timetable and self._timetable[0][0] <= now:
            outgoing = self._held(*heapq.heappop(self._timetable))
            if outgoing is not None and outgoing.give_up_s > now:
                ripe.append(outgoing)
        for outgoing in ripe:
            outgoing.sent_s = now
            outgoing.wait_s = min(outgoing.wait_s * _BACKOFF, self._retry_max_s)
            outgoing.due_s = now + outgoing.wait_s
            self._schedule(outgoing)
        return [msgspec.structs.replace(each.envelope, age_s=now - each.posted_s) for each in ripe]

    def next_due(self) -> float | None:
        """Return when `due` or `undeliverable` may have something to say next; None: nothing is waiting."""
        if not self._outstanding:
            return None
        while self._timetable and self._held(*self._timetable[0]) is None:
            heapq.heappop(self._timetable)
        return min(self._timetable[0][0], self._give_up_from_s) if self._timetable else self._give_up_from_s

    def undeliverable(self, now: float) -> list[Envelope]:
        """Return, once, what was not acknowledged for `give_up_s`; it is not sent any more."""
        if now < self._give_up_from_s:
            return []
        given_up = []
        self._give_up_from_s = math.inf
        for waiting in self._outgoing.values():
            for number, outgoing in list(waiting.items()):
                if outgoing.give_up_s > now:
                    self._give_up_from_s = min(self._give_up_from_s, outgoing.give_up_s)
                    break
                del waiting[number]
                given_up.append(outgoing.envelope)
        self._outstanding -= len(given_up)
        return given_up

    def hurry(self, now: float) -> None:
        """Start all waits over: nothing could arrive for a while, and can again."""
        for receiver in self._outgoing:
            self._hurry(receiver, now)

    def reached(self, receiver: str, now: float) -> None:
        """Send at once what waits for a receiver that was out of reach when it was to be sent."""
        for outgoing in self._outgoing.get(receiver, {}).values():
            outgoing.wait_s, outgoing.due_s = self._retry_s, now
            self._schedule(outgoing)

    def forget(self, receiver: str) -> None:
        """Drop what is unacknowledged for a receiver that is gone. Its numbers continue where they were."""
        self._outstanding -= len(self._outgoing.pop(receiver, {}))

    def forget_all(self) -> None:
        """Drop what is unacknowledged, for all receivers. Numbers continue where they were."""
        self._outgoing.clear()
        self._outstanding = 0

    def _outdate(self, waiting: dict[int, Outgoing], body: Message) -> None:
        """Drop orders of earlier generations: while a receiver is away, they would pile up."""
        for number, outgoing in list(waiting.items()):
            earlier = outgoing.envelope.body
            if isinstance(body, OrderRanks):
                void = isinstance(earlier, OrderRanks) and body.outdates(earlier)
            else:
                void = isinstance(earlier, OF_A_GENERATION)
            if void and outgoing.envelope.generation < self.generation:
                del waiting[number]
                self._outstanding -= 1

    # --- receiving ----------------------------------------------------------------------------------------------

    def take(self, envelope: Envelope, now: float) -> Taken:
        """Judge an envelope that arrived. Never raises; what is refused is counted.

        A message that is delivered is not acknowledged here: call `acknowledge` when it has been taken in (a
        controller: when it is in the journal). A repeated one is answered at once if it was taken in, and not at all
        before.
        """
        sender = self._senders.get(envelope.sender)
        if (refusal := self._fault_of(envelope, sender, now)) is not None:
            return self._refuse(refusal)
        new_session = sender is None or sender.session != envelope.session
        if sender is None or new_session:
            sender = self._senders[envelope.sender] = SenderMemory(envelope.session)
            self._hurry(envelope.sender, now)
        sender.heard_s = now
        if envelope.sender == CONTROLLER:
            self.term = max(self.term, envelope.term)
            self.generation = max(self.generation, envelope.generation)
        if isinstance(envelope.body, Ack):
            return self._take_ack(envelope.sender, envelope.body, new_session)
        if envelope.number and not sender.mark_taken(envelope.number):
            self.refused[Refusal.DUPLICATE] += 1
            known = sender.was_acknowledged(envelope.number)
            return Taken(False, Refusal.DUPLICATE, self._ack(envelope) if known else None, new_session)
        return Taken(True, new_session=True) if new_session else _DELIVERED

    def forget_sender(self, sender: str) -> None:
        """Forget a sender that will not be heard again."""
        self._senders.pop(sender, None)

    def acknowledge(self, envelope: Envelope) -> Envelope:
        """Note that a delivered envelope has been taken in, and return the answer to send. Only for numbers above 0."""
        sender = self._senders.get(envelope.sender)
        if sender is not None and sender.session == envelope.session:
            sender.mark_acknowledged(envelope.number)
        return self._ack(envelope)

    def recall(self, sender: str, memory: SenderMemory) -> None:
        """Note all that an earlier process in its place had taken in from a sender. For a restart, from the journal."""
        known = self._senders.get(sender)
        if known is None or known.session <= memory.session:
            self._senders[sender] = memory

    def remember(self, sender: str, session: int, number: int) -> None:
        """Note that a message was taken in by an earlier process in its place. For a restart, from the journal."""
        known = self._senders.get(sender)
        if known is None or known.session < session:
            known = self._senders[sender] = SenderMemory(session)
        if known.session == session and number > 0:
            known.mark_taken(number)
            known.mark_acknowledged(number)

    # --- inside -------------------------------------------------------------------------------------------------

    def _envelope(self, body: Message, receiver: str, number: int) -> Envelope:
        return Envelope(
            version=PROTOCOL_VERSION,
            job=self.job,
            sender=self.address,
            receiver=receiver,
            term=self.term,
            generation=self.generation,
            session=self.session,
            number=number,
            body=body,
        )

    def _ack(self, envelope: Envelope) -> Envelope:
        return self._envelope(Ack(session=envelope.session, number=envelope.number), envelope.sender, 0)

    def _refuse(self, refusal: Refusal) -> Taken:
        self.refused[refusal] += 1
        return Taken(False, refusal)

    def _fault_of(self, envelope: Envelope, known: SenderMemory | None, now: float) -> Refusal | None:
        """Say why the envelope must not even be looked into."""
        refusal = None
        if envelope.job != self.job:
            refusal = Refusal.WRONG_JOB
        elif envelope.receiver != self.address:
            refusal = Refusal.WRONG_RECEIVER
        elif envelope.sender == self.address:
            refusal = Refusal.OWN_ADDRESS
        elif min(envelope.number, envelope.session, envelope.term, envelope.generation) < 0:
            refusal = Refusal.NEGATIVE
        elif envelope.sender == CONTROLLER and envelope.term < self.term:
            refusal = Refusal.OLD_TERM
        elif known is None:
            refusal = Refusal.TOO_MANY_SENDERS if len(self._senders) >= MAX_SENDERS else None
        elif self._is_stale(envelope, known, now):
            refusal = Refusal.STALE_SESSION
        return refusal

    def _is_stale(self, envelope: Envelope, known: SenderMemory, now: float) -> bool:
        """Say whether a later session of the sender has been heard.

        A controller of a higher term is never stale: a standby may have been started long before the one it replaces.
        Nor is a detector when the later session has been quiet: it is started again under the same name, perhaps after
        a clock that was ahead was put right, and what it says twice does no harm.
        """
        if envelope.session >= known.session:
            return False
        if envelope.sender.startswith(DETECTOR_PREFIX):
            return now - known.heard_s < DETECTOR_QUIET_S
        return not (envelope.sender == CONTROLLER and envelope.term > self.term)

    def _take_ack(self, sender: str, ack: Ack, new_session: bool) -> Taken:
        if ack.session != self.session:
            self.refused[Refusal.UNKNOWN_ACK] += 1
            return Taken(False, Refusal.UNKNOWN_ACK, new_session=new_session)
        # Without an entry it is the second answer to a message that was sent twice.
        if self._outgoing.get(sender, {}).pop(ack.number, None) is not None:
            self._outstanding -= 1
        return Taken(False, new_session=True) if new_session else _TAKEN

    def _hurry(self, receiver: str, now: float) -> None:
        """Start the waits for a receiver again: it has just appeared, and may have missed everything before."""
        for outgoing in self._outgoing.get(receiver, {}).values():
            outgoing.wait_s = self._retry_s
            due_s = max(now, outgoing.sent_s + self._retry_s)
            if due_s < outgoing.due_s:
                outgoing.due_s = due_s
                self._schedule(outgoing)

    def _schedule(self, outgoing: Outgoing) -> None:
        if len(self._timetable) > 2 * self._outstanding + 64:  # mostly entries of what has been acknowledged
            self._timetable = [entry for entry in self._timetable if self._held(*entry) is not None]
            heapq.heapify(self._timetable)
        envelope = outgoing.envelope
        heapq.heappush(self._timetable, (outgoing.due_s, envelope.receiver, envelope.number))

    def _held(self, due_s: float, receiver: str, number: int) -> Outgoing | None:
        """Return the message of an entry of the timetable, unless it has been acknowledged or put off since."""
        outgoing = self._outgoing.get(receiver, {}).get(number)
        return outgoing if outgoing is not None and outgoing.due_s == due_s else None


_DELIVERED, _TAKEN = Taken(True), Taken(False)
