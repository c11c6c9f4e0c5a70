"""Requests of operators on this machine and on other ones: whose they are, in which order and at what pace served.

Those of this machine come over the control socket. Those of other machines come over the controller's port, from
connections whose key stands for a role. To answer them takes time of the loop that recovers the job. So only a share of
that time is theirs, whatever they send; admins come first and viewers last.
"""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from ...protocol.identities import Role, role_of
from ...protocol.transport import Received
from . import control_requests as ask
from .local_sockets import ControlServer

MOST_WAITING = 32  # requests of each role
SHARE = 0.1  # of the loop's time
LEAST_COST_S = 0.005  # of a request, however cheap
MAX_REQUEST_BYTES = 64 * 1024
MAX_REPLY_BYTES = 8 * 1024 * 1024
ANSWERED_BYTES = 8 * 1024 * 1024  # over one connection; who does not read them keeps no more than one answer more
_REMEMBERED = 1024  # connections: more than there can be at once
_LOGGED = 20  # of one kind of refusal, then one in _LOGGED
OWNER = "owner"
_READS = (ask.StatusRequest, ask.PolicyRequest, ask.IncidentsRequest, ask.StoryRequest)

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(ask.Request).decode
_log = logging.getLogger(__name__)


class OperatorWire(Protocol):
    """The carrier of the bytes."""

    def from_operators(self) -> list[Received]:
        """Return what operators have sent, once."""

    def answer_operator(self, connection: str, data: bytes) -> None:
        """Send an answer."""


class RemoteAsker(msgspec.Struct, frozen=True):
    """The connection of an operator on another machine."""

    connection: str


class RemoteOperators:
    """The controller's end. Never blocks; an operator that goes away costs nothing."""

    def __init__(self, wire: OperatorWire) -> None:
        self._wire = wire
        self._waiting: dict[Role, deque[tuple[str, ask.Request]]] = {role: deque() for role in reversed(Role)}
        self._answered: OrderedDict[str, int] = OrderedDict()  # bytes, by connection
        self._not_before_s = 0.0
        self._refused: Counter[str] = Counter()

    @property
    def refused(self) -> Counter[str]:
        """Requests that were refused so far, by reason."""
        return Counter(self._refused)

    def next_s(self) -> float | None:
        """Return after how long there is something to do; None: nothing waits."""
        if not any(self._waiting.values()):
            return None
        return max(0.0, self._not_before_s - time.monotonic())

    def requests(self) -> Iterator[tuple[RemoteAsker, ask.Request]]:
        """Yield at most one request, with the connection to answer. What is refused is answered and counted."""
        for received in self._wire.from_operators():
            self._take(received)
        began_s = time.monotonic()
        queue = next((queue for queue in self._waiting.values() if queue), None)
        if queue is None or began_s < self._not_before_s:
            return
        connection, request = queue.popleft()
        try:
            yield RemoteAsker(connection), request
        finally:  # the user has answered it, or made it an event
            now = time.monotonic()
            self._not_before_s = now + max(LEAST_COST_S, now - began_s) * (1 / SHARE - 1)

    def answer(self, asker: RemoteAsker, reply: ask.Reply) -> None:
        """Answer; nothing happens if the asker is gone."""
        data = _encode(reply)
        if len(data) > MAX_REPLY_BYTES:
            data = _encode(ask.Refused(f"the answer has {len(data)} bytes, more than {MAX_REPLY_BYTES}"))
        answered = self._answered.pop(asker.connection, 0)
        self._answered[asker.connection] = answered + len(data)
        while len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)
        self._wire.answer_operator(asker.connection, data)

    def _take(self, received: Received) -> None:
        """Let a request wait for its turn, or refuse it."""
        role = role_of(received.identity)
        if role is None:  # a key of no role that this version knows
            self._refused["operators: no role"] += 1
            return
        asker = RemoteAsker(received.identity)
        if self._answered.get(received.identity, 0) >= ANSWERED_BYTES:
            self._refuse(asker, role, "connection had its share", ask.Refused("connect again: this one had its share"))
            return
        request = _decoded(received.data)
        if isinstance(request, ask.Refused):
            self._refuse(asker, role, "no request of this version", request)
            return
        refused = ask.refusal_of(role, request)
        if refused is not None:
            self._refuse(asker, role, f"{role} may not {ask.right_of(request).does}", refused)
        elif len(self._waiting[role]) >= MOST_WAITING:
            self._refuse(
                asker, role, "too many requests", ask.Refused("too many requests wait; try again in some seconds")
            )
        else:
            if not isinstance(request, _READS):
                _log.info("an operator with the role %s asks to %s", role, ask.right_of(request).does)
            self._waiting[role].append((received.identity, request))

    def _refuse(self, asker: RemoteAsker, role: Role, reason: str, refused: ask.Refused) -> None:
        counted = f"operators: {reason}"
        self._refused[counted] += 1
        count = self._refused[counted]
        if count <= _LOGGED or count % _LOGGED == 0:
            _log.warning("a request of the role %s is refused, %s (%d so far)", role, reason, count)
        self.answer(asker, refused)


def _decoded(data: bytes) -> ask.Request | ask.Refused:
    if len(data) > MAX_REQUEST_BYTES:
        return ask.Refused(f"a request has at most {MAX_REQUEST_BYTES} bytes, and this one {len(data)}")
    try:
        request: ask.Request = _decode_request(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        return ask.Refused(f"not a request of this midstep: {error}")
    return request


Asker = str | RemoteAsker
"""A connection to the control socket, or one from another machine."""


class OperatorRequests:
    """Hands out the requests of both, and brings the answers back."""

    def __init__(self, control: ControlServer, wire: OperatorWire) -> None:
        """`control` stays its creator's to close. Requests from other machines come in when `wire` is received from."""
        self._control = control
        self._remote = RemoteOperators(wire)

    @property
    def refused(self) -> dict[str, int]:
        """The number of refusals so far, by reason."""
        return {**self._control.refused, **self._remote.refused}

    @property
    def pending(self) -> bool:
        """Return whether there is something to do now."""
        return self._control.pending or self._remote.next_s() == 0.0

    def next_due(self, now: float) -> float | None:
        """Return when a request that waits may be answered; None: none waits."""
        left_s = self._remote.next_s()
        return None if left_s is None else now + left_s

    def fileno(self) -> int:
        """Return the descriptor of the control socket; the wire has its own."""
        return self._control.fileno()

    def requests(self) -> Iterator[tuple[Asker, ask.Request]]:
        """Yield a bounded number of requests, with whom to answer."""
        yield from self._control.requests()
        yield from self._remote.requests()

    @staticmethod
    def role(asker: Asker) -> str:
        """Return the role of an asker in words; who reaches the control socket owns the job."""
        return str(role_of(asker.connection)) if isinstance(asker, RemoteAsker) else OWNER

    def answer(self, asker: Asker, reply: ask.Reply) -> None:
        """Answer; nothing happens if the asker is gone."""
        if isinstance(asker, RemoteAsker):
            self._remote.answer(asker, reply)
        else:
            self._control.answer(asker, reply)
