"""Virtual time, threads in it, and what connects them: a bad network, byzantine messages, communicators.

Nothing waits on the timeline, so an hour of a job takes milliseconds. The network between the product's own mailboxes
loses, delays, doubles and reorders. A byzantine message is of another step, an earlier incarnation or another
generation; it must not bring the controller to break an invariant. What a rank says about the content of its state is
believed, as checksums guard only its way. The communicators of one generation connect, meet, pass things on, and break.

A played thread is a generator that yields what it waits for. An abort or a broken link tears it out of a collective;
while its process is stopped, hangs or is dead, it does not go on.
"""

import heapq
import math
import random
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

import msgspec

from ...protocol import messages as m
from ...protocol.compat import StrEnum
from ...protocol.errors import CommunicatorAborted, CommunicatorFailed, LinkUpFailed, MidstepError
from ...protocol.mailbox import Mailbox
from ...protocol.messages import Ack, Envelope, Message
from ...protocol.types import CONTROLLER, Activity, Rendezvous, node_address
from ..invariants import Invariant

RESENDS_S = 15.0
_FAR = 1_000_000  # steps and messages that no simulated job gets to
_OF_AN_INCARNATION = (m.RankJoined, m.RankQuiesced, m.RankReady, m.StepCommitted, m.RankFinished)
_OF_A_GENERATION = (m.RankQuiesced, m.RankReady, m.StepCommitted, m.RankFinished, m.CheckpointSaved)
JITTER_S = (0.002, 0.004, 0.03)  # peers learn of the same thing at different times
FAILURE_S = 0.02  # a broken connection is noticed within this
Key = tuple[object, ...]
Returned = TypeVar("Returned")
Wait = Callable[[Callable[[Any], None]], None]  # is handed what lets the thread go on, with what it has waited for
Thread = Generator[Wait, Any, Returned]


class Timeline:
    """A heap of things to happen. Equal times keep the order in which they were asked for."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.now = start_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have `call` happen `delay_s` from now. What must not happen any more has to say so itself."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), self._count, call))

    def step(self) -> bool:
        """Let the next thing happen; False when there is none."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        call()
        return True


class PlayedThread:
    """The train thread of a process, which can be torn out of what it does."""

    def __init__(self, rank: int, timeline: "Timeline") -> None:
        self.rank = rank
        self.timeline = timeline
        self.alive, self.suspended, self.hung = True, False, False
        self.slowness = 1.0
        self.epoch = 0  # how often the thread has gone on, or was torn out of what it did
        self.group: Group | None = None
        self.failed: str | None = None  # why the communicators have failed
        self.in_collective = False  # and fails out of it when the communicators do
        self.activity = Activity.STARTING
        self.since_s = self.step_since_s = timeline.now
        self.collectives = 0
        self._thread: Thread[None] | None = None

    def play(self, thread: Thread[None]) -> None:
        """Be this thread, from its beginning on."""
        self._thread = thread
        self._go_on(None)

    def still(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return `call`, which is void when the thread has gone on meanwhile, or cannot go on."""
        epoch = self.epoch

        def go(value: Any) -> None:
            if self.alive and not self.suspended and not self.hung and epoch == self.epoch:
                call(value)

        return go

    def sleep(self, delay_s: float) -> Wait:
        """Let time pass."""
        return lambda go: self.timeline.after(delay_s, lambda: go(None))

    def within(self, limit_s: float, wait: Wait, error: MidstepError) -> Wait:
        """Wait in a collective, which fails with `error` when it takes longer than `limit_s`."""

        def begin(go: Callable[[Any], None]) -> None:
            epoch = self.epoch

            def give_up() -> None:
                if self.alive and epoch == self.epoch:
                    self._tear(0.0, error)

            self.timeline.after(limit_s, give_up)
            wait(go)

        return begin

    def doing(self, activity: Activity) -> None:
        """Set the step clock's activity."""
        self.activity, self.since_s = activity, self.timeline.now

    # --- communicators ------------------------------------------------------------------------------------------

    def link_up(self, group: "Group", store: Rendezvous, limit_s: float) -> Thread[None]:
        """Connect to all others at a store. Raises LinkUpFailed after `limit_s`, or what `enter` raises."""
        self.group, self.failed, self.in_collective = group, None, True
        error = LinkUpFailed(f"not connected within {limit_s} s")
        yield self.within(limit_s, lambda go: group.connect(self, store, lambda: go(None)), error)

    def enter(self, activity: Activity) -> "Thread[Group]":
        """Begin a collective, and return where. Raises CommunicatorError, now or while it is waited for."""
        assert self.group is not None
        self.doing(activity)
        self.collectives += 1
        if self.failed is not None:
            yield self.sleep(0.001)
            raise CommunicatorFailed(self.failed)
        self.in_collective = True
        return self.group

    def abort(self, reason: str) -> None:
        """Abort the communicators (any thread). A train thread in a collective fails out of it."""
        if self.group is not None:
            self.group.leave(self)
        self.failed = self.failed or reason
        self._tear(0.002, CommunicatorAborted(reason))

    def lose_connection(self, group: "Group", reason: str) -> None:
        """A peer has gone, or a link broke."""
        if self.alive and not self.suspended and self.group is group and self.failed is None:
            self.failed = reason
            self._tear(0.0, CommunicatorFailed(reason))

    def raise_now(self, error: MidstepError) -> None:
        """Have what the thread waits for fail."""
        assert self._thread is not None
        self.in_collective = False
        self._wait_for(lambda thread: thread.throw(error))

    # --- inside -------------------------------------------------------------------------------------------------

    def _go_on(self, value: Any) -> None:
        self._wait_for(lambda thread: thread.send(value))

    def _wait_for(self, next_of: Callable[[Thread[None]], Wait]) -> None:
        assert self._thread is not None
        try:
            wait = next_of(self._thread)
        except StopIteration:
            return
        self.epoch += 1
        wait(self.still(self._go_on))

    def _tear(self, delay_s: float, error: MidstepError) -> None:
        if self.in_collective:
            self.in_collective = False
            self.epoch += 1
            throw = self.still(lambda _: self.raise_now(error))
            self.timeline.after(delay_s, lambda: throw(None))


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
        """Return whether everything that was said should have arrived by now, resends included."""
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
        acknowledged: Callable[[int], None] | None = None,
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
        self._acknowledged = acknowledged
        self._due_s = math.inf

    def close(self) -> None:
        """Be gone."""
        self.open = False

    def post(self, body: Message, receiver: str) -> int | None:
        """Send a message until it is acknowledged, and return its number."""
        if not self.open:
            return None
        envelope = self.mailbox.post(body, receiver, self._timeline.now)
        self._transmit(envelope)
        self._plan()
        return envelope.number

    def hurry(self) -> None:
        """Send again soon what could not arrive for a while."""
        self.mailbox.hurry(self._timeline.now)
        self._plan()

    def receive(self, envelope: Envelope, *, void: bool = False) -> None:
        """An envelope has arrived. `void`: nothing in it is believed, and it is acknowledged."""
        if not self.open or self.deaf:
            return
        taken = self.mailbox.take(envelope, self._timeline.now)
        if taken.reply is not None:
            self._transmit(taken.reply)
        if taken.new_session and self._new_session is not None:
            self._new_session(envelope)
        if isinstance(envelope.body, Ack) and taken.refused is None and self._acknowledged is not None:
            self._acknowledged(envelope.body.number)
        if taken.deliver:
            self._judge(envelope)
        if taken.deliver and (void or self._take(envelope)) and self.open and (envelope.number or not void):
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
        """Return whether everything has been acknowledged."""
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


class Byzantine(StrEnum):
    """A defect of the next message."""

    EARLIER_INCARNATION = "an earlier incarnation"
    LATER_INCARNATION = "an incarnation that is yet to come"
    OLD_GENERATION = "a generation that is over"
    NEW_GENERATION = "a generation that was never opened"
    WRONG_STEP = "a step where it does not stand"
    REPEATED = "again what it said in earlier generations"


def falsified(body: m.Message, kind: Byzantine, chance: random.Random) -> m.Message | None:
    """Return the message with that wrong in it; None where it has no room for it."""
    if kind in {Byzantine.EARLIER_INCARNATION, Byzantine.LATER_INCARNATION} and isinstance(body, _OF_AN_INCARNATION):
        shift = -1 if kind is Byzantine.EARLIER_INCARNATION else 1
        return msgspec.structs.replace(body, incarnation=max(0, body.incarnation + shift))
    if kind in {Byzantine.OLD_GENERATION, Byzantine.NEW_GENERATION} and isinstance(body, _OF_A_GENERATION):
        shift = -1 if kind is Byzantine.OLD_GENERATION else chance.choice((1, 7))
        return msgspec.structs.replace(body, generation=max(0, body.generation + shift))
    if kind is Byzantine.WRONG_STEP and isinstance(body, m.RankReady):
        return msgspec.structs.replace(body, step=max(0, body.step + chance.choice((-1, 1, 3))))
    if kind is Byzantine.WRONG_STEP and isinstance(body, m.StepCommitted):
        return msgspec.structs.replace(body, committed=body.committed + chance.choice((1, 3)))
    return None


def forged(envelope: m.Envelope, rank: int, *, node: str, session: int) -> m.Envelope:
    """Return what an agent of another node says of a rank that it overhears: that it has finished."""
    word = m.RankFinished(rank, envelope.generation, envelope.session, _FAR)
    body = m.RanksReported(node, (m.RankReport(rank, envelope.session, word),))
    return msgspec.structs.replace(envelope, sender=node_address(node), session=session, number=0, body=body)


class Member(Protocol):
    """A train thread, as its communicators know it."""

    rank: int

    def lose_connection(self, group: "Group", reason: str) -> None:
        """A peer has gone, or a link broke."""
        ...


class Group:
    """One generation's communicators. A collective completes when every rank has entered it."""

    def __init__(
        self,
        timeline: Timeline,
        chance: random.Random,
        size: int,
        *,
        fails: bool,
        serves: Callable[[Rendezvous], bool],
    ) -> None:
        """`serves` says whether a rendezvous store listens where a process looks for it."""
        self._serves = serves
        self._timeline = timeline
        self._chance = chance
        self._size = size
        self.frozen = False  # collectives hang without a word
        self.votes: dict[int, list[bool]] = {}  # at the commit barrier of each step
        self.ballots: dict[int, list[tuple[bytes, bool]]] = {}  # the same, and whether it is a voice
        self.evidence: dict[int, list[bytes]] = {}  # the same, of what was computed
        self.marks: dict[Key, set[str]] = {}  # what is silently wrong in what is sent
        self._fails = fails  # the connections do not come up
        self._connecting: dict[int, tuple[Member, Callable[[], None]]] = {}
        self._stores: dict[int, Rendezvous] = {}
        self._members: dict[int, Member] = {}
        self._entered: dict[Key, dict[int, tuple[Member, Callable[[], None]]]] = {}
        self._posted: dict[Key, int] = {}
        self._receiving: dict[Key, Callable[[int], None]] = {}

    def connect(self, process: Member, store: Rendezvous, done: Callable[[], None]) -> None:
        """Wait for all ranks at a store, then go on."""
        if not self._serves(store):
            return
        self._connecting[process.rank] = (process, done)
        self._stores[process.rank] = store
        if len(self._connecting) == self._size and not self._fails and len(set(self._stores.values())) == 1:
            self._members = {rank: each for rank, (each, _) in self._connecting.items()}
            for _, call in self._connecting.values():
                self._soon(call)

    def leave(self, process: Member) -> None:
        """A process ends or aborts: it connects with no other any more, and its peers notice."""
        known = self._connecting.get(process.rank)
        if known is not None and known[0] is process and not self._members:
            del self._connecting[process.rank]
            del self._stores[process.rank]
        if self._members.get(process.rank) is process:
            for peer in self._members.values():
                if peer is not process:
                    self._notice(peer, f"connection closed by peer {process.rank}")

    def cut(self, process: Member) -> None:
        """A link of a process breaks under it."""
        self._notice(process, "connection reset")

    def enter(self, key: Key, process: Member, done: Callable[[], None]) -> None:
        """Enter a collective of all ranks."""
        entered = self._entered.setdefault(key, {})
        entered[process.rank] = (process, done)
        if len(entered) == self._size and not self.frozen:
            for _, call in entered.values():
                self._soon(call)

    def post(self, key: Key, value: int) -> None:
        """Send something to one peer; does not wait."""
        self._posted[key] = value
        waiting = self._receiving.pop(key, None)
        if waiting is not None:
            self._soon(lambda: waiting(value))

    def receive(self, key: Key, done: Callable[[int], None]) -> None:
        """Wait for what one peer sends."""
        if key in self._posted:
            value = self._posted[key]
            self._soon(lambda: done(value))
        else:
            self._receiving[key] = done

    def _soon(self, call: Callable[[], None]) -> None:
        self._timeline.after(self._chance.random() * self._chance.choice(JITTER_S), call)

    def _notice(self, peer: Member, reason: str) -> None:
        self._timeline.after(self._chance.random() * FAILURE_S, lambda: peer.lose_connection(self, reason))
