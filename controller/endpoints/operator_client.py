"""Asks a job's controller from another machine, as an operator with a token.

All endpoints are tried at once, and the first one whose handshake succeeds is asked. One that stands by, or is about to
lead, has done nothing: it says which one leads, and that one is asked, or the same one a little later. One that may
have taken a request is not asked again: it may do something, and must not do it twice.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
import zmq

from ...protocol.discovery import MOST_ENDPOINTS, each_address
from ...protocol.errors import NotAdmitted
from ...protocol.identities import family_of
from ...protocol.keys import ClientKeys
from ...protocol.nonblocking import HandshakeWatch
from ...protocol.token import RoleToken, expiry_text
from ...protocol.transport import DealerSocket
from .control_requests import Reply, Request, TryLater, decode_reply
from .local_sockets import NoController

_POLL_MS = 50
_NONCE_BYTES = 8
_AGAIN_S = 0.25  # to one that has said that it does not serve

_encode = msgspec.msgpack.Encoder().encode


class _Connection(msgspec.Struct, frozen=True):
    """A connection to one endpoint."""

    endpoint: str
    socket: DealerSocket
    watch: HandshakeWatch


def ask_from_elsewhere(
    endpoints: Sequence[str], token: RoleToken, request: Request, timeout_s: float, *, follows: bool = True
) -> Reply:
    """Ask the controller that leads the token's job, and return its answer.

    `follows`: ask one that another controller names, too. Raises NotAdmitted when the token is not taken, NoController
    without an answer within `timeout_s`, MidstepError when the answer is not of this version.
    """
    with ExitStack() as stack:
        asking = _Asking(stack, token, _encode(request), follows=follows)
        for endpoint in each_address(endpoints):
            asking.connect(endpoint)
        reply = asking.answer(time.monotonic() + timeout_s)
        if reply is None:
            raise NoController(asking.why(timeout_s))
        return reply


class _Asking:
    """Asks one controller after the other, until one of them serves."""

    def __init__(self, stack: ExitStack, token: RoleToken, request: bytes, *, follows: bool) -> None:
        self._stack = stack
        self._token = token
        self._request = request
        self._follows = follows
        self._poller = zmq.Poller()
        self._connections: dict[str, _Connection] = {}
        self._not_before_s: dict[str, float] = {}
        self._asked: _Connection | None = None
        self._later: TryLater | None = None

    def connect(self, endpoint: str) -> None:
        """Add an endpoint. Raises ConfigurationError."""
        connection = self._stack.enter_context(_connection(endpoint, self._token))
        self._connections[endpoint] = connection
        self._poller.register(connection.socket.raw, zmq.POLLIN)
        self._poller.register(connection.watch.monitor, zmq.POLLIN)

    def answer(self, until_s: float) -> Reply | None:
        """Return the answer of one that serves; None: there was none. Raises NotAdmitted, MidstepError."""
        while time.monotonic() < until_s:
            self._poller.poll(_POLL_MS)
            for connection in list(self._connections.values()):
                connection.watch.look()
                for received in connection.socket.receive():
                    reply = decode_reply(connection.endpoint, received.data)
                    if not isinstance(reply, TryLater):
                        return reply
                    self._put_off(connection, reply)
                self._ask(connection, until_s)
            if self._asked is None and self._later is None:
                _require_fit(list(self._connections.values()), self._token)
        return None

    def _ask(self, connection: _Connection, until_s: float) -> None:
        now = time.monotonic()
        ready = now >= self._not_before_s.get(connection.endpoint, 0.0)
        if self._later is not None and until_s - now < _AGAIN_S:
            return  # there is no time for the answer, and what is known by now would be known no more
        if self._asked is None and ready and connection.watch.admitted and connection.socket.connected:
            connection.socket.send(self._request)
            self._asked = connection

    def _put_off(self, connection: _Connection, later: TryLater) -> None:
        if self._asked is connection:
            self._asked = None
        self._later = later
        self._not_before_s[connection.endpoint] = time.monotonic() + _AGAIN_S
        known = later.endpoint in {"", *self._connections} or len(self._connections) >= MOST_ENDPOINTS
        if self._follows and not known:
            self.connect(later.endpoint)

    def why(self, timeout_s: float) -> str:
        """Say why there was no answer."""
        if self._later is not None and self._asked is None:
            return f"job {self._token.job} is not served at present, within {timeout_s:g} s: {self._later.text}"
        return _why(list(self._connections.values()), self._asked, self._token, timeout_s)


@contextmanager
def _connection(endpoint: str, token: RoleToken) -> Iterator[_Connection]:
    identity = family_of(token.role) + secrets.token_hex(_NONCE_BYTES)
    keys = ClientKeys(identity, token.keys.public, token.keys.secret, token.server_public)
    watch = HandshakeWatch()
    socket = DealerSocket(endpoint, identity=identity, curve=keys, watch=watch)
    try:
        yield _Connection(endpoint, socket, watch)
    finally:
        socket.close()


def _require_fit(connections: Sequence[_Connection], token: RoleToken) -> None:
    """Raise NotAdmitted when a controller does not take the token, or is that of another one."""
    for connection in connections:
        if connection.watch.turned_away:
            lasts = token.expires_s == 0 or time.time() < token.expires_s
            why = "the job's token was replaced" if lasts else f"it expired at {expiry_text(token.expires_s)}"
            raise NotAdmitted(
                f"the controller at {connection.endpoint} takes this token no longer: {why}, or that controller "
                "is of an earlier version. Whoever has the job's token of now makes one for each role "
                "(`midstep token --role`)."
            )
    if all(connection.watch.misfit for connection in connections):
        where = ", ".join(connection.endpoint for connection in connections)
        raise NotAdmitted(
            f"the token is not one of job {token.job} at {where}: another job, or one that was started with another "
            "token, listens there. Take a token that was made from that job's, and the job's own name."
        )


def _why(connections: Sequence[_Connection], asked: _Connection | None, token: RoleToken, timeout_s: float) -> str:
    within = f"within {timeout_s:g} s"
    if asked is not None:
        return (
            f"the controller of job {token.job} at {asked.endpoint} has not answered {within}. It may have ended, or "
            "have done what it was asked for: look with `midstep status`."
        )
    reached = [connection.endpoint for connection in connections if connection.watch.reached]
    if reached:
        return (
            f"what listens at {', '.join(reached)} has not proven to be the controller of job {token.job} {within}. It "
            "may be coming up, or frozen, or be something else: try again, and check the address."
        )
    return (
        f"nothing listens at {', '.join(each.endpoint for each in connections)}: the job {token.job} has ended, its "
        "controller leads on another machine (name them all, with commas), or no way leads there (names, firewalls)."
    )
