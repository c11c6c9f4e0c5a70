"""The rendezvous store of a job without torch: a key-value server, and a client with the methods of torch's Store.

Where torch is installed its TCPStore serves, as scripts of their own and gloo's C++ talk to that one. This one does
what midstep itself needs of it. It is as open as torch's: what its clients leave there they sign (`rendezvous.py`).
"""

import asyncio
import enum
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Protocol

import msgspec

from ..protocol.compat import within

MAX_FRAME_BYTES = 1 << 27  # of a request or an answer: a value has at most half of it
MAX_CONNECTIONS = 4096
_LENGTH = struct.Struct("<I")
_GRACE_S = 5.0  # for the server to say that a wait has timed out
_LEAST_S = 0.001
_CLOSED_S = 5.0
_log = logging.getLogger(__name__)

Keys = Annotated[list[str], msgspec.Meta(max_length=1 << 16)]


class StoreTimeout(Exception):
    """No value came for a key within the time."""


class StoreFull(Exception):
    """The store holds as many bytes as it may."""


class StoreOperation(enum.IntEnum):
    """The operation that a client asks for."""

    SET = 0
    GET = 1
    WAIT = 2
    CHECK = 3
    ADD = 4
    COMPARE_SET = 5
    DELETE = 6
    COUNT = 7


class StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request. Which of the fields mean something depends on the operation."""

    operation: StoreOperation
    keys: Keys = []
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0


class StoreReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one request; `timed_out` alone for a wait that was in vain, `full` for a value without room."""

    value: bytes = b""
    number: int = 0
    timed_out: bool = False
    full: bool = False


class ValueKeeper(Protocol):
    """Keeps values where they outlive the server. Called in threads of its own, by one at a time. Raises OSError."""

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, in the place of an earlier one."""
        ...

    def delete(self, key: str) -> None:
        """Keep a value no longer."""
        ...


_REQUESTS = msgspec.msgpack.Decoder(StoreRequest)
_ANSWERS = msgspec.msgpack.Decoder(StoreReply)


class KeyValueServer:
    """Serves clients on a socket that listens already, in a thread, until it is closed or the process ends.

    `limit_bytes`: of all keys and values together; None: no limit.
    """

    def __init__(self, listener: socket.socket, limit_bytes: int | None = None) -> None:
        self._listener = listener
        self._limit_bytes = limit_bytes
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._keeper: ValueKeeper | None = None
        self._writing = asyncio.Lock()
        self._connections = 0
        self._changed: asyncio.Event | None = None
        self._closing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="midstep-store", daemon=True)
        self._thread.start()

    def begin(self, values: Mapping[str, bytes], keeper: ValueKeeper | None) -> None:
        """Serve these values in the place of all others, soon, and answer changes once `keeper` has them.

        A change that it cannot keep is refused as one without room. From any thread.
        """
        self._call(lambda: self._begin(values, keeper))

    def close(self) -> None:
        """Close the socket and all connections. From any other thread; idempotent."""
        if self._thread.is_alive():
            self._call(self._closing.set)
            self._thread.join(_CLOSED_S)

    def _call(self, act: Callable[[], None]) -> None:
        self._ready.wait(_CLOSED_S)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act)

    async def _serve(self) -> None:
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connected, sock=self._listener)
        self._ready.set()
        await self._closing.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            while self._connections <= MAX_CONNECTIONS:
                request = _REQUESTS.decode(await _read_frame(reader))
                writer.write(_frame(msgspec.msgpack.encode(await self._answer(request))))
                await writer.drain()
        except (
            OSError,
            EOFError,
            ValueError,
            asyncio.CancelledError,
        ):  # it is gone, no client of ours, or all is closed
            pass
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, request: StoreRequest) -> StoreReply:
        values, keys = self._values, request.keys
        key = keys[0] if keys else ""
        match request.operation:
            case StoreOperation.WAIT:
                return StoreReply(timed_out=not await self._have_come(keys, request.timeout_s))
            case StoreOperation.GET:
                return StoreReply(values.get(key, b""), int(key in values))
            case StoreOperation.CHECK:
                return StoreReply(number=int(all(each in values for each in keys)))
            case StoreOperation.COUNT:
                return StoreReply(number=len(values))
            case _:
                async with self._writing:  # what is kept and what is served change in one order
                    return await self._changed_by(request, key)

    async def _changed_by(self, request: StoreRequest, key: str) -> StoreReply:
        match request.operation:
            case StoreOperation.DELETE:
                return await self._delete(key)
            case StoreOperation.ADD:
                total = int(self._values.get(key, b"0")) + request.amount
                return StoreReply(number=total, full=not await self._set(key, b"%d" % total))
            case StoreOperation.COMPARE_SET:
                expected = self._values.get(key, b"") == request.expected
                full = expected and not await self._set(key, request.value)
                return StoreReply(self._values.get(key, b""), full=full)
            case _:
                return StoreReply(full=not await self._set(key, request.value))

    async def _set(self, key: str, value: bytes) -> bool:
        """Set a value; False where there is no room for it."""
        assert self._changed is not None
        more = len(value) + (-len(self._values[key]) if key in self._values else len(key))
        if self._limit_bytes is not None and self._bytes + more > self._limit_bytes:
            return False
        what = f"a value of {len(value)} bytes for the store"
        if not await self._is_kept(what, lambda keeper: keeper.set(key, value)):
            return False
        self._values[key] = value
        self._bytes += more
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return True

    def _begin(self, values: Mapping[str, bytes], keeper: ValueKeeper | None) -> None:
        self._values, self._keeper = dict(values), keeper
        self._bytes = sum(len(key) + len(value) for key, value in values.items())

    async def _is_kept(self, what: str, change: Callable[[ValueKeeper], None]) -> bool:
        """Have a change kept, if values are; False where that fails, or other values are served by now."""
        values = self._values
        if self._keeper is not None:
            try:
                await asyncio.to_thread(change, self._keeper)
            except OSError as error:
                _log.error("%s is refused, as it cannot be kept: %s", what, error)
                return False
        return values is self._values

    async def _delete(self, key: str) -> StoreReply:
        if key not in self._values:
            return StoreReply()
        if not await self._is_kept("a deletion from the store", lambda keeper: keeper.delete(key)):
            return StoreReply(full=True)
        self._bytes -= len(key) + len(self._values.pop(key))
        return StoreReply(number=1)

    async def _have_come(self, keys: Sequence[str], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not all(key in self._values for key in keys):
            assert self._changed is not None
            try:
                await within(max(_LEAST_S, deadline - time.monotonic()), self._changed.wait())
            except TimeoutError:
                return False
        return True


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"{length} bytes are more than a request may have")
    return await reader.readexactly(length)


def _frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class Store:
    """The base of all stores; torch's class of this name where torch is installed."""


class KeyValueClient(Store):
    """A client, with the methods of torch's TCPStore that midstep uses. Used by one thread at a time."""

    def __init__(
        self, host: str, port: int, *, timeout: timedelta, is_master: bool = False, wait_for_workers: bool = False
    ) -> None:
        """Connect within `timeout`, which is then that of each request. Raises OSError."""
        self._timeout_s = timeout.total_seconds()
        self._connection = socket.create_connection((host, port), timeout=self._timeout_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key. Raises StoreFull."""
        self._ask(StoreRequest(StoreOperation.SET, [key], value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value. Raises StoreTimeout."""
        self.wait([key], timedelta(seconds=self._timeout_s))
        return self._ask(StoreRequest(StoreOperation.GET, [key])).value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values. Raises StoreTimeout."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if self._ask(StoreRequest(StoreOperation.WAIT, list(keys), timeout_s=limit_s), limit_s).timed_out:
            raise StoreTimeout(f"nothing came for {', '.join(keys)} within {limit_s:g} s")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._ask(StoreRequest(StoreOperation.CHECK, list(keys))).number)

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key holds, and return the sum."""
        return self._ask(StoreRequest(StoreOperation.ADD, [key], amount=amount)).number

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace a value that is as expected, and return what is there now."""
        return self._ask(StoreRequest(StoreOperation.COMPARE_SET, [key], desired, expected)).value

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it was there."""
        return bool(self._ask(StoreRequest(StoreOperation.DELETE, [key])).number)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self._ask(StoreRequest(StoreOperation.COUNT)).number

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, request: StoreRequest, more_s: float = 0.0) -> StoreReply:
        # After an error the next answer could be that of this request: the connection is of no use any more.
        self._connection.settimeout(self._timeout_s + more_s + _GRACE_S)
        try:
            self._connection.sendall(_frame(msgspec.msgpack.encode(request)))
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ConnectionError(f"an answer of {length} bytes")
            answer = _ANSWERS.decode(self._receive(length))
        except BaseException:
            self._connection.close()
            raise
        if answer.full:
            raise StoreFull(f"there is no room in the store for {', '.join(request.keys)}")
        return answer

    def _receive(self, length: int) -> Any:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionError("the store closed the connection")
            view = view[count:]
        return bytes(data)
