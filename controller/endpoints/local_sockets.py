"""The unix sockets of a job in its run directory, open to its owner only.

The control socket takes an operator's commands: `ControlServer` is the controller's end, `ask` the command line's. The
detectors' socket (`LineServer`) takes fault reports, one JSON document a line.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec

from ...detectors.lines import MAX_LINE_BYTES, parse_line
from ...protocol.compat import within
from ...protocol.connection import ConnectionLimits
from ...protocol.errors import ConfigurationError, DocumentError, MidstepError
from ...protocol.transport import DealerSocket, RouterSocket, prepare_ipc, wait
from ...protocol.types import FaultReport
from .control_requests import Accepted, Refused, Reply, Request, TryLater, decode_reply

SOCKET_NAME = "controller.sock"
REQUESTS_PER_TURN = 32
MAX_REPLY_BYTES = 8 * 1024 * 1024
AGAIN_S = 0.1  # to a controller that is about to lead
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
        """Return whether requests wait. Asked before every wait: see `protocol.transport`."""
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
    give_up, later = time.monotonic() + timeout_s, None
    dealer = DealerSocket(f"ipc://{path}", identity=f"cli-{os.getpid()}-{secrets.token_hex(4)}", curve=None)
    try:
        dealer.send(_encode(request))
        while (left_s := give_up - time.monotonic()) > 0:
            wait([dealer], (), left_s)
            for received in dealer.receive():
                reply = decode_reply(path, received.data)
                if not isinstance(reply, TryLater):
                    return reply
                later = reply
                time.sleep(max(0.0, min(AGAIN_S, give_up - time.monotonic())))
                dealer.send(_encode(request))
    finally:
        dealer.close()
    if later is not None:
        raise NoController(f"{path}: not served within {timeout_s:g} s: {later.text}")
    raise NoController(
        f"{path}: no answer within {timeout_s:g} s. The controller has died or is stopped; "
        "`midstep run` restarts it, so try again."
    )


DETECTORS_SOCKET = "detectors.sock"
DEFAULT_NAME = "socket"
MAX_CONNECTIONS = 64
IDLE_S = 3600.0  # a connection over which nothing comes for so long is closed; sooner where others need the room
ANSWER_S = 60.0  # a journal that cannot be written for so long: the program is asked to try again
_PEER = struct.Struct("3i")  # pid, uid, gid

_log = logging.getLogger(__name__)

TakeReport = Callable[[FaultReport, Callable[[Reply], None]], None]


class LineAnswer(msgspec.Struct, frozen=True):
    """The answer to a line. `text`: what follows from it, or why it changes nothing."""

    ok: bool
    text: str


class LineServer:
    """The controller's end. `take` gets each report, and answers when it is durable."""

    def __init__(self, run_directory: Path, take: TakeReport) -> None:
        """Open no socket before `open`."""
        self._path = run_directory.resolve() / DETECTORS_SOCKET
        self._take = take
        self._connections: dict[asyncio.StreamWriter, float] = {}  # when each was last heard
        self._server: asyncio.Server | None = None
        self._inode = 0

    async def open(self) -> None:
        """Listen. Raises ConfigurationError when the run directory is open to others, or another process listens."""
        prepare_ipc(self._path)
        self._path.unlink(missing_ok=True)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=MAX_LINE_BYTES)
            self._path.chmod(0o600)
            self._inode = self._path.stat().st_ino
        except OSError as error:
            raise ConfigurationError(f"cannot listen at {self._path}: {error}.") from error

    async def close(self) -> None:
        """Stop listening and remove the socket file. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:  # and not that of a controller that leads by now
                    self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._take_in(writer)
        try:
            if _owner_of(writer) != os.getuid():
                return
            async for line in _lines(reader):
                self._connections[writer] = time.monotonic()
                if line.strip():
                    await _answer(writer, await self._answered(line))
        except (OSError, TimeoutError) as error:
            _log.debug("a detector's connection ended: %s", error)
        finally:
            self._connections.pop(writer, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _take_in(self, writer: asyncio.StreamWriter) -> None:
        """Add a connection; where there are too many, the one that has been silent the longest is closed for it."""
        if len(self._connections) >= MAX_CONNECTIONS:
            silent = min(self._connections, key=self._connections.__getitem__)
            del self._connections[silent]
            _log.warning("more than %d connections of detectors; the one silent the longest is closed", MAX_CONNECTIONS)
            silent.transport.abort()  # what it has not read by now it will not read
        self._connections[writer] = time.monotonic()

    async def _answered(self, line: bytes) -> LineAnswer:
        try:
            report = parse_line(line, DEFAULT_NAME, time.time())
        except DocumentError as error:
            _log.warning("a detector's line is skipped: %s", error)
            return LineAnswer(False, str(error))
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._take(report, lambda reply: None if answered.done() else answered.set_result(reply))
        try:
            reply = await within(ANSWER_S, answered)
        except TimeoutError:
            return LineAnswer(False, f"not durable after {ANSWER_S:g} s; say it again later")
        if isinstance(reply, Accepted):
            return LineAnswer(True, reply.text)
        return LineAnswer(False, reply.reason if isinstance(reply, Refused) else "no answer to a report")


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines until the end. One that is too long is an empty object, which is refused with words, once."""
    while True:
        try:
            yield await within(IDLE_S, reader.readuntil(b"\n"))
        except asyncio.IncompleteReadError as ended:
            if ended.partial:
                yield ended.partial
            return
        except asyncio.LimitOverrunError:
            yield b"{}\n"
            await within(IDLE_S, _skip_line(reader))


async def _skip_line(reader: asyncio.StreamReader) -> None:
    """Throw away the rest of a line that is too long, piece by piece."""
    while True:
        try:
            await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as longer:
            await reader.readexactly(longer.consumed)
        except asyncio.IncompleteReadError:
            return
        else:
            return


async def _answer(writer: asyncio.StreamWriter, answer: LineAnswer) -> None:
    writer.write(msgspec.json.encode(answer) + b"\n")
    await within(ANSWER_S, writer.drain())


def _owner_of(writer: asyncio.StreamWriter) -> int:
    connection = writer.get_extra_info("socket")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    owner: int = _PEER.unpack(peer)[1]
    return owner
