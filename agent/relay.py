"""Relays messages between the ranks of this node and the controller, unchanged, and refuses forged senders."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq

from ..protocol.codec import decode, pack, unpack
from ..protocol.errors import WireError
from ..protocol.messages import Envelope
from ..protocol.transport import Received, RouterSocket
from ..protocol.types import CONTROLLER

_log = logging.getLogger(__name__)


class Relay:
    """The agent's socket for its processors. Belongs to the running loop.

    `oldest_session(address)` is the oldest session that a sender may have: that of the process that holds the rank now.
    Late messages of an earlier process are refused. None refuses a rank that this node does not have.
    """

    def __init__(
        self,
        router: RouterSocket,
        *,
        oldest_session: Callable[[str], int | None],
        forward: Callable[[bytes], None],
    ) -> None:
        self._router = router
        self._oldest_session = oldest_session
        self._forward = forward
        self._loop = asyncio.get_running_loop()
        self._leaving: dict[str, list[bytes]] = {}  # what this turn of the loop has for each rank
        self.refused: Counter[str] = Counter()

    @property
    def endpoint(self) -> str:
        """The endpoint to which processors connect."""
        return self._router.endpoint

    def deliver(self, envelope: Envelope, data: bytes) -> None:
        """Hand the controller's envelope to its rank. A rank that is not connected yet gets it when it is resent."""
        if envelope.sender != CONTROLLER:
            self.refused["not from the controller"] += 1
        else:
            if not self._leaving:
                self._loop.call_soon(self._flush)
            self._leaving.setdefault(envelope.receiver, []).append(data)

    def received(self, batch: list[Received]) -> None:
        """Forward what ranks have sent to the controller; refuse, count and log the rest."""
        for frame in batch:
            try:
                messages = unpack(frame.data)
            except WireError:
                self._refuse("malformed", frame.identity)
                continue
            for message in messages:
                reason = self._refusal_of(message, frame.identity)
                if reason is None:
                    self._forward(bytes(message))
                else:
                    self._refuse(reason, frame.identity)

    def close(self) -> None:
        """Close the socket and remove its file. Idempotent."""
        self._leaving.clear()
        self._router.close()

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, {}
        for rank, messages in leaving.items():
            for frame in pack(messages):
                if not self._router.send(rank, frame):
                    self.refused["rank not connected"] += 1

    def _refuse(self, reason: str, identity: str) -> None:
        self.refused[reason] += 1
        _log.warning("refused a message from %s: %s", identity, reason)

    def _refusal_of(self, message: msgspec.Raw, identity: str) -> str | None:
        try:
            envelope = decode(message)
        except WireError:
            return "malformed"
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
