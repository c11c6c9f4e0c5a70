"""The detectors' socket: a unix socket in the run directory that takes fault reports, one JSON object a line.

Open to the job's owner only, like the control socket: the directory and the file say so, and the kernel is asked which
user is at the other end. Each line is answered by one, after what it says is durable. docs/faults.md describes both.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from ...detectors.lines import MAX_LINE_BYTES, parse_line
from ...protocol.endpoints import prepare_ipc
from ...protocol.errors import ConfigurationError, DocumentError
from ...protocol.time_limit import within
from ...protocol.types import FaultReport
from .control_requests import Accepted, Refused, Reply

SOCKET_NAME = "detectors.sock"
DEFAULT_NAME = "socket"
MAX_CONNECTIONS = 64
IDLE_S = 3600.0  # a connection over which nothing comes for so long is closed; sooner where others need the room
ANSWER_S = 60.0  # a journal that cannot be written for so long: the program is asked to try again
_PEER = struct.Struct("3i")  # pid, uid, gid

_log = logging.getLogger(__name__)

TakeReport = Callable[[FaultReport, Callable[[Reply], None]], None]


class LineAnswer(msgspec.Struct, frozen=True):
    """What is answered to a line. `text`: what follows from it, or why it changes nothing."""

    ok: bool
    text: str


class LineServer:
    """The controller's end. `take` gets each report, and answers when it is durable."""

    def __init__(self, run_directory: Path, take: TakeReport) -> None:
        """Open no socket before `open`."""
        self._path = run_directory.resolve() / SOCKET_NAME
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
