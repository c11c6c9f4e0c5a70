"""Asks a job's controller from another machine, as an operator with a token.

All endpoints are tried at once; the first one whose handshake succeeds is the controller that leads, since those that
stand by do not listen. It is asked once: a request may do something, and must not do it twice.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
import zmq

from ...protocol.discovery import each_address
from ...protocol.errors import NotAdmitted
from ...protocol.identities import family_of
from ...protocol.keys import ClientKeys
from ...protocol.nonblocking import HandshakeWatch
from ...protocol.token import RoleToken, expiry_text
from ...protocol.transport import DealerSocket
from .control_requests import Reply, Request, decode_reply
from .local_sockets import NoController

_POLL_MS = 50
_NONCE_BYTES = 8

_encode = msgspec.msgpack.Encoder().encode


class _Connection(msgspec.Struct, frozen=True):
    """A connection to one endpoint."""

    endpoint: str
    socket: DealerSocket
    watch: HandshakeWatch


def ask_from_elsewhere(endpoints: Sequence[str], token: RoleToken, request: Request, timeout_s: float) -> Reply:
    """Ask the controller that leads the token's job, and return its answer.

    Raises NotAdmitted when the token is not taken, NoController without an answer within `timeout_s`, MidstepError when
    the answer is not of this version.
    """
    until_s = time.monotonic() + timeout_s
    asked: _Connection | None = None
    with ExitStack() as stack:
        connections = [stack.enter_context(_connection(endpoint, token)) for endpoint in each_address(endpoints)]
        poller = zmq.Poller()
        for connection in connections:
            poller.register(connection.socket.raw, zmq.POLLIN)
            poller.register(connection.watch.monitor, zmq.POLLIN)
        while time.monotonic() < until_s:
            poller.poll(_POLL_MS)
            for connection in connections:
                connection.watch.look()
                for received in connection.socket.receive():
                    return decode_reply(connection.endpoint, received.data)
                if asked is None and connection.watch.admitted and connection.socket.connected:
                    connection.socket.send(_encode(request))
                    asked = connection
            if asked is None:
                _require_fit(connections, token)
        raise NoController(_why(connections, asked, token, timeout_s))


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
