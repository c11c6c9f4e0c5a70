"""The least controller that an agent can talk to."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from midstep.protocol.codec import envelopes_of, frame_of
from midstep.protocol.compat import within
from midstep.protocol.keys import JobKeys
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    CommandToRank,
    Envelope,
    Message,
    OrderRanks,
    ProcessesStarted,
    RankCommand,
    RanksReported,
)
from midstep.protocol.transport import Received, RouterSocket
from midstep.protocol.types import CONTROLLER, PLATFORM, node_address

JOB = "agent-test"
LONG_S = 60.0  # no claim about speed: a loaded machine takes its time

_Body = TypeVar("_Body", bound=msgspec.Struct)


def _words(body: Message) -> list[Message]:
    if isinstance(body, ProcessesStarted):
        return [body, *body.started]
    return [body, *(report.word for report in body.reports)] if isinstance(body, RanksReported) else [body]


class Controller:
    """The least that an agent can talk to: it keeps what it hears, and sends what the test says."""

    def __init__(self, root: Path, nodes: int = 1) -> None:
        self.root = root
        identities = [PLATFORM, *(node_address(f"node{number}") for number in range(nodes))]
        JobKeys.create(root / "keys", identities)
        self.term = 1
        self.heard: list[Envelope] = []
        self.acknowledges = True  # what it has heard
        self._changed = asyncio.Event()
        self._identities: dict[str, str] = {}
        self._open("tcp://127.0.0.1:0")

    def _open(self, endpoint: str) -> None:
        self._mailbox = Mailbox(job=JOB, address=CONTROLLER, session=time.time_ns())
        self._mailbox.term = self.term
        self.router = RouterSocket(endpoint, curve=JobKeys.load_server(self.root / "keys"))
        self.router.attach(asyncio.get_running_loop(), self._received)

    def restart(self) -> None:
        """Be another controller at the same place."""
        endpoint = self.router.endpoint
        self.router.close()
        self.heard.clear()
        self.term += 1
        self._open(endpoint)

    def _received(self, batch: list[Received]) -> None:
        for message in batch:
            for envelope in envelopes_of(message.data):
                self._take(envelope, message.identity)
        self._changed.set()

    def _take(self, envelope: Envelope, identity: str) -> None:
        self._identities[envelope.sender] = identity
        taken = self._mailbox.take(envelope, time.monotonic())
        if taken.reply is not None:
            self.router.send(identity, frame_of(taken.reply))
        if taken.deliver:
            self.heard.append(envelope)
        if envelope.number and self.acknowledges and taken.reply is None:
            self.router.send(identity, frame_of(self._mailbox.acknowledge(envelope)))

    def send(self, body: Message, receiver: str) -> None:
        """Send a command, as soon as the receiver is connected."""
        envelope = self._mailbox.post(body, receiver, time.monotonic())
        self._try_to_send(self._identities.get(receiver, receiver), frame_of(envelope))

    def _try_to_send(self, identity: str, data: bytes) -> None:
        if not self.router.send(identity, data):
            asyncio.get_running_loop().call_later(0.05, self._try_to_send, identity, data)

    def order(self, body: Message, node: str = "node0") -> None:
        self.send(body, node_address(node))

    def order_rank(self, rank: int, generation: int, command: RankCommand, node: str = "node0") -> None:
        """Send a command for a rank of a node."""
        self.order(OrderRanks((CommandToRank(rank, generation, command),)), node)

    def all(self, kind: type[_Body]) -> list[_Body]:
        """Return what was heard of a kind: of nodes, and of ranks in their nodes' reports."""
        return [body for envelope in self.heard for body in _words(envelope.body) if isinstance(body, kind)]

    @property
    def waits(self) -> int:
        """Return how many commands nobody has acknowledged."""
        return self._mailbox._outstanding

    async def until(self, kind: type[_Body], which: Callable[[_Body], bool] = lambda _: True) -> _Body:
        """Wait for the first message of a kind that fits."""
        deadline = time.monotonic() + LONG_S
        while True:
            self._changed.clear()
            found = [body for body in self.all(kind) if which(body)]
            if found:
                return found[0]
            remaining = deadline - time.monotonic()
            heard = [type(each.body).__name__ for each in self.heard if each.number]
            assert remaining > 0, f"no {kind.__name__}; heard {heard}"
            with contextlib.suppress(TimeoutError):
                await within(min(remaining, 1.0), self._changed.wait())
