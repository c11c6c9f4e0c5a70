"""The control socket: a unix socket in the run directory, open to the job's owner only, for the operator's commands.

`ControlServer` is the controller's end, `ask` the command line's.
"""

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...protocol.connection_limits import ConnectionLimits
from ...protocol.errors import MidstepError
from ...protocol.transport import DealerSocket, RouterSocket, wait
from .control_requests import Refused, Reply, Request, decode_reply

SOCKET_NAME = "controller.sock"
REQUESTS_PER_TURN = 32
MAX_REPLY_BYTES = 8 * 1024 * 1024
# A command line asks, waits some seconds, and leaves. The one that has been silent the longest makes room.
LIMITS = ConnectionLimits(connections=32, unproven=32, unproven_per_address=32, idle_s=60.0)

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode


class NoController(MidstepError):
    """No controller answers at the control socket."""


def socket_path(run_directory: Path) -> Path:
    """Return where the control socket of a job lies."""
    return run_directory.resolve() / SOCKET_NAME


class ControlServer:
    """The controller's end. Never blocks; a client that goes away costs nothing."""

    def __init__(self, run_directory: Path) -> None:
        """Listen. The run directory must be the owner's alone. Raises ConfigurationError if that cannot be."""
        self._socket = RouterSocket(f"ipc://{socket_path(run_directory)}", curve=None, limits=LIMITS)
        self._malformed = 0

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there may be requests."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether requests wait. Asked before every wait: see `protocol.transport`."""
        return self._socket.pending

    @property
    def refused(self) -> Counter[str]:
        """Requests and connections that were refused so far, by reason."""
        at_the_socket = {f"control socket: {reason}": count for reason, count in self._socket.refused.items()}
        return Counter(at_the_socket) + Counter({"control request of another version": self._malformed})

    def requests(self) -> Iterator[tuple[str, Request]]:
        """Yield a bounded number of requests, with the connection to answer. Other bytes are answered and counted."""
        for received in self._socket.receive(limit=REQUESTS_PER_TURN):
            try:
                request = _decode_request(received.data)
            except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
                self._malformed += 1
                self.answer(received.identity, Refused(f"not a request of this midstep: {error}"))
                continue
            yield received.identity, request

    def answer(self, identity: str, reply: Reply) -> None:
        """Answer; nothing happens if the asker is gone."""
        data = _encode(reply)
        if len(data) > MAX_REPLY_BYTES:
            data = _encode(
                Refused(f"the answer has {len(data)} bytes, more than {MAX_REPLY_BYTES}; read the journal instead")
            )
        self._socket.send(identity, data)

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._socket.close()


def ask(run_directory: Path, request: Request, timeout_s: float = 5.0) -> Reply:
    """Ask the controller of a job and return its answer.

    Raises NoController without an answer within `timeout_s`, MidstepError when the answer is not of this version.
    """
    path = socket_path(run_directory)
    if not path.exists():
        raise NoController(f"{path}: there is no controller here. The job has ended, or it runs on another machine.")
    give_up = time.monotonic() + timeout_s
    dealer = DealerSocket(f"ipc://{path}", identity=f"cli-{os.getpid()}-{secrets.token_hex(4)}", curve=None)
    try:
        dealer.send(_encode(request))
        while (left_s := give_up - time.monotonic()) > 0:
            wait([dealer], (), left_s)
            for received in dealer.receive():
                return decode_reply(path, received.data)
    finally:
        dealer.close()
    raise NoController(
        f"{path}: no answer within {timeout_s:g} s. The controller has died or is stopped; "
        "`midstep run` restarts it, so try again."
    )
