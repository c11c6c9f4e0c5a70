"""How the ranks of a node and the controller hear each other through the node's agent: a node speaks once.

What the ranks of a node report at about one time goes up as one message, and what they are ordered in one turn of the
controller comes down as one. So a job of ten thousand ranks costs its controller what its nodes say. Two hops are as
safe as one: an agent that ends takes its ranks with it, so nothing is lost that would have to outlive it. A report is
acknowledged to its rank only when the controller has acknowledged the node's message, that is when it is durable. A
command is acknowledged to the controller at once, and repeated from here until its rank has taken it in.

Pure: time is an argument, and the owner of the sockets sends what comes out. The agent has one, and so does each node
of a simulated job.
"""

import logging
from collections.abc import Callable, Collection, Iterator

import msgspec

from .bounds import LATEST_S
from .codec import MAX_MESSAGE_BYTES
from .errors import MailboxFull
from .mailbox import Mailbox
from .messages import (
    Ack,
    Envelope,
    NodeReport,
    OrderRanks,
    ProcessesStarted,
    ProcessStarted,
    RankReport,
    RanksReported,
    RankWord,
)
from .types import CONTROLLER, rank_address, rank_of

GATHER_PER_RANK_S = 0.000005  # for each rank of the job: a small job is answered at once
GATHER_MAX_S = 0.005
STARTS_WAIT = 20  # times as long for what is only known to be started: nothing waits for that
MOST_TOGETHER = 1024  # reports in one message
MOST_TOGETHER_BYTES = 256 * 1024  # of one message, unless one report has more: it becomes one value of the journal
MOST_OF_A_REPORT_BYTES = MAX_MESSAGE_BYTES - 4096  # what is around it in the message of its node has less
MOST_UNCONFIRMED = 10_000  # messages of the node, as a mailbox keeps them
MOST_GATHERED = 10_000  # reports, while too much waits for a controller; ranks repeat what is refused then
NOT_A_REPORT = "not for a rank to say"
TOO_LARGE = "too large for the message of a node"
TOO_MUCH_WAITS = "too much waits for a controller"

_log = logging.getLogger(__name__)


def gathering_of(world_size: int) -> float:
    """Return for how many seconds a node of a job of so many ranks waits for the reports of its other ranks."""
    return min(GATHER_PER_RANK_S * world_size, GATHER_MAX_S)


class _Heard(msgspec.Struct, frozen=True):
    """A report that has come from a rank. `at_s`: when, on the caller's clock."""

    envelope: Envelope
    size_bytes: int
    at_s: float

    @property
    def rank(self) -> int:
        rank = rank_of(self.envelope.sender)
        assert rank is not None  # the agent knows the sender
        return rank


class RankRelay:
    """Gathers what ranks report, and hands them what they are ordered. Not thread-safe."""

    def __init__(self, *, job: str, node: str, session: int) -> None:
        """`session`: of the node's agent, in whose life its ranks live."""
        self._node = node
        self._ranks = Mailbox(job=job, address=CONTROLLER, session=session)  # speaks to ranks in the controller's name
        self._gathered: list[_Heard] = []
        self._spoke: set[int] = set()  # ranks of which something is gathered
        self._started: list[ProcessStarted] = []  # before any of them has spoken
        self._unconfirmed: dict[int, list[Envelope]] = {}  # by the number of the node's message

    @property
    def refused(self) -> dict[str, int]:
        """Messages of ranks that were refused so far, by reason."""
        return dict(self._ranks.refused)

    # --- up -----------------------------------------------------------------------------------------------------

    def hear(self, envelope: Envelope, size_bytes: int, now: float) -> Envelope | None:
        """Take in an envelope of a rank of this node; return what is to be answered at once, if anything."""
        if not isinstance(envelope.body, RankWord | Ack):
            self._ranks.refused[NOT_A_REPORT] += 1
            return None
        if len(self._gathered) >= MOST_GATHERED and not isinstance(envelope.body, Ack):
            self._ranks.refused[TOO_MUCH_WAITS] += 1
            return None
        if size_bytes > MOST_OF_A_REPORT_BYTES:
            self._ranks.refused[TOO_LARGE] += 1
            return None
        taken = self._ranks.take(envelope, now)
        if taken.deliver:
            heard = _Heard(envelope, size_bytes, now)
            self._gathered.append(heard)
            self._spoke.add(heard.rank)
        return taken.reply

    def is_due(self, ranks: Collection[int]) -> bool:
        """Say whether to send at once what is gathered: each of these ranks, all of the node, has spoken."""
        return bool(self._gathered) and (len(self._gathered) >= MOST_TOGETHER or self._spoke.issuperset(ranks))

    @property
    def has_gathered(self) -> bool:
        """Return whether there is something to send."""
        return bool(self._gathered or self._started)

    def started(self, report: ProcessStarted) -> None:
        """Gather that a process has been started; it is said before what is gathered of ranks."""
        self._started.append(report)

    def leave(self, post: Callable[[NodeReport], int | None], now: float) -> None:
        """Post what is gathered. `post` returns the number of the message, or None: it cannot be kept at present.

        Then it stays gathered, for the next time.
        """
        while self._started:
            if post(ProcessesStarted(self._node, tuple(self._started[:MOST_TOGETHER]))) is None:
                return
            del self._started[:MOST_TOGETHER]
        gathered, self._gathered = self._gathered, []
        self._spoke.clear()
        sent = 0
        for together in _messages(gathered):
            number = post(RanksReported(self._node, tuple(_report(heard, now) for heard in together)))
            if number is None:
                self._gathered = gathered[sent:]
                self._spoke = {heard.rank for heard in self._gathered}
                return
            sent += len(together)
            self._unconfirmed[number] = [heard.envelope for heard in together if heard.envelope.number]
            if len(self._unconfirmed) > MOST_UNCONFIRMED:
                del self._unconfirmed[next(iter(self._unconfirmed))]

    def acknowledged(self, number: int) -> list[Envelope]:
        """The controller has made a message of the node durable: return the acknowledgements for its ranks."""
        return [self._ranks.acknowledge(envelope) for envelope in self._unconfirmed.pop(number, ())]

    # --- down ---------------------------------------------------------------------------------------------------

    def order(self, message: OrderRanks, term: int, now: float) -> list[Envelope]:
        """Return the commands in a message of the controller of `term` for its ranks, each to be sent now."""
        self._ranks.term = max(self._ranks.term, term)
        envelopes = []
        for each in message.orders:
            self._ranks.generation = max(self._ranks.generation, each.generation)
            try:
                envelopes.append(self._ranks.post(each.command, rank_address(each.rank), now))
            except MailboxFull as error:
                _log.error("%s for rank %d is not handed on: %s", type(each.command).__name__, each.rank, error)
        return envelopes

    def follow(self, term: int) -> None:
        """Another controller leads, of this term: it orders again what it wants of the ranks."""
        self._ranks.term = max(self._ranks.term, term)
        self._ranks.forget_all()

    def forget(self, rank: int) -> None:
        """Repeat nothing any more of what was ordered to a rank: another process is to hold it."""
        self._ranks.forget(rank_address(rank))

    def due(self, now: float) -> list[Envelope]:
        """Return the commands that are to be sent to their ranks again."""
        for envelope in self._ranks.undeliverable(now):
            _log.warning("a %s was not taken in by %s", type(envelope.body).__name__, envelope.receiver)
        return self._ranks.due(now)

    def next_due(self) -> float | None:
        """Return when `due` has something to do; None: each rank has taken in what it was ordered."""
        return self._ranks.next_due()


def _report(heard: _Heard, now: float) -> RankReport:
    envelope = heard.envelope
    body = envelope.body
    assert isinstance(body, RankWord)
    age_s = max(0.0, envelope.age_s) + max(0.0, now - heard.at_s)
    return RankReport(heard.rank, envelope.session, body, min(age_s, LATEST_S))  # one that is none spoils no others


def _messages(gathered: list[_Heard]) -> Iterator[list[_Heard]]:
    """Yield what goes into one message each, in order."""
    together: list[_Heard] = []
    size_bytes = 0
    for heard in gathered:
        if together and (len(together) >= MOST_TOGETHER or size_bytes + heard.size_bytes > MOST_TOGETHER_BYTES):
            yield together
            together, size_bytes = [], 0
        together.append(heard)
        size_bytes += heard.size_bytes
    if together:
        yield together
