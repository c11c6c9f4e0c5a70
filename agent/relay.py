"""The agent's socket for the ranks of its node. What they say leaves as the node's words; forged senders are refused.

What is said to whom, and again, is decided in `protocol/rank_relay.py`; here it is carried.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import msgspec
import zmq

from ..protocol.codec import decode, encode, pack, unpack
from ..protocol.errors import WireError
from ..protocol.messages import Envelope, NodeReport, OrderRanks, ProcessStarted
from ..protocol.rank_relay import STARTS_WAIT, RankRelay, gathering_of
from ..protocol.transport import Received, RouterSocket
from ..protocol.types import CONTROLLER

AGAIN_S = 2.0  # when too much waits for a controller

_log = logging.getLogger(__name__)


class Relay:
    """Carries messages between ranks and the controller. Belongs to the running loop.

    `oldest_session(address)` is the oldest session that a sender may have: that of the process that holds the rank now.
    Late messages of an earlier process are refused. None refuses a rank that this node does not have. `ranks` returns
    those that have a process here. `post` sends a report of the node, and returns its number.
    """

    def __init__(
        self,
        router: RouterSocket,
        *,
        job: str,
        node: str,
        session: int,
        oldest_session: Callable[[str], int | None],
        ranks: Callable[[], Collection[int]],
        post: Callable[[NodeReport], int | None],
    ) -> None:
        self._router = router
        self._oldest_session = oldest_session
        self._ranks = ranks
        self._post = post
        self._words = RankRelay(job=job, node=node, session=session)
        self._loop = asyncio.get_running_loop()
        self._gather_s = 0.0
        self._to_ranks: dict[str, list[bytes]] = {}  # what this turn of the loop has for each rank
        self._gathering: asyncio.TimerHandle | None = None
        self._starting: asyncio.TimerHandle | None = None
        self._repeating: asyncio.TimerHandle | None = None
        self._closed = False
        self._refused: Counter[str] = Counter()

    @property
    def endpoint(self) -> str:
        """The endpoint to which processors connect."""
        return self._router.endpoint

    @property
    def refused(self) -> dict[str, int]:
        """Messages that were refused so far, by reason."""
        return dict(self._refused + Counter(self._words.refused))

    def expect_ranks(self, world_size: int) -> None:
        """Gather for as long as suits a job of so many ranks."""
        self._gather_s = gathering_of(world_size)

    def received(self, batch: list[Received]) -> None:
        """Take in what ranks have sent; refuse, count and log the rest."""
        now = time.monotonic()
        for frame in batch:
            try:
                messages = unpack(frame.data)
            except WireError:
                self._refuse("malformed", frame.identity)
                continue
            for message in messages:
                self._hear(message, frame.identity, now)
        if self._words.is_due(self._ranks()):
            self.leave()
        elif self._words.has_gathered and self._gathering is None:
            self._gathering = self._loop.call_later(self._gather_s, self.leave)
        self._repeat_later()

    def started(self, report: ProcessStarted) -> None:
        """Send that a process was started, together with others: behind what ranks have said, before what they say."""
        if self._gathering is not None:
            self.leave()
        self._words.started(report)
        if self._starting is None:
            self._starting = self._loop.call_later(STARTS_WAIT * self._gather_s, self.leave)

    def leave(self) -> None:
        """Send what is gathered now, before anything else that the node has to say."""
        for timer in (self._gathering, self._starting):
            if timer is not None:
                timer.cancel()
        self._gathering = self._starting = None
        if self._closed or not self._words.has_gathered:
            return
        self._words.leave(self._post, time.monotonic())
        if self._words.has_gathered:
            self._gathering = self._loop.call_later(AGAIN_S, self.leave)

    def acknowledged(self, number: int) -> None:
        """Tell the ranks that what they reported is durable: the controller has taken in a report of the node."""
        self._send(self._words.acknowledged(number))

    def order(self, envelope: Envelope, message: OrderRanks) -> None:
        """Hand commands to the ranks. Those that are not connected yet get them when they are repeated."""
        self._send(self._words.order(message, envelope.term, time.monotonic()))
        self._repeat_later()

    def follow(self, term: int) -> None:
        """Another controller leads: what the last one ordered is not repeated."""
        self._words.follow(term)

    def forget(self, rank: int) -> None:
        """Repeat nothing to a rank that gets another process."""
        self._words.forget(rank)

    def close(self) -> None:
        """Close the socket and remove its file. Idempotent."""
        self._closed = True
        for timer in (self._gathering, self._starting, self._repeating):
            if timer is not None:
                timer.cancel()
        self._to_ranks.clear()
        self._router.close()

    def _hear(self, message: msgspec.Raw, identity: str, now: float) -> None:
        try:
            envelope = decode(message)
        except WireError:
            self._refuse("malformed", identity)
            return
        reason = self._refusal_of(envelope, identity)
        if reason is not None:
            self._refuse(reason, identity)
            return
        answer = self._words.hear(envelope, memoryview(message).nbytes, now)
        if answer is not None:
            self._send([answer])

    def _send(self, envelopes: Iterable[Envelope]) -> None:
        """Send envelopes to their ranks at the end of this turn of the loop, one frame to each."""
        for envelope in envelopes:
            if not self._to_ranks:
                self._loop.call_soon(self._flush)
            self._to_ranks.setdefault(envelope.receiver, []).append(encode(envelope))

    def _flush(self) -> None:
        leaving, self._to_ranks = self._to_ranks, {}
        if self._closed:
            return
        for rank, messages in leaving.items():
            for frame in pack(messages):
                if not self._router.send(rank, frame):
                    self._refused["rank not connected"] += 1

    def _repeat_later(self) -> None:
        due_s = self._words.next_due()
        if self._repeating is None and due_s is not None and not self._closed:
            self._repeating = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._repeat)

    def _repeat(self) -> None:
        self._repeating = None
        self._send(self._words.due(time.monotonic()))
        self._repeat_later()

    def _refuse(self, reason: str, identity: str) -> None:
        self._refused[reason] += 1
        _log.warning("refused a message from %s: %s", identity, reason)

    def _refusal_of(self, envelope: Envelope, identity: str) -> str | None:
        if envelope.sender != identity:
            return "sender is not the connected rank"
        if envelope.receiver != CONTROLLER:
            return "not for the controller"
        oldest = self._oldest_session(envelope.sender)
        if oldest is None:
            return "unknown rank"
        return "session of an earlier process" if envelope.session < oldest else None


def listen(path: str, context: "zmq.Context[zmq.Socket[bytes]]") -> RouterSocket:
    """Open the unix socket for the processors at `path`. Raises ConfigurationError."""
    return RouterSocket(f"ipc://{path}", curve=None, context=context)
