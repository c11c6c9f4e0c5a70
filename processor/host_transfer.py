"""Transfer shards from host to host, in chunks, several under way at once, each range with a checksum behind it.

Hashing and copying one chunk overlaps with the flight of the next. A chunk inside one tensor is sent from, and received
into, the tensor's own memory; what lies on a device goes through a bounded staging memory of the host.

Why it cannot deadlock: the ranges move in rounds. In round k each rank goes through its transfers in the one global
order, waits for chunk k and posts chunk k + n, where n is how many it has under way. A rank that waits for another one
is therefore ahead of it by more rounds than that rank's n, which cannot hold around a circle; and two transfers between
one pair are posted in the same order at both ends, as a rank has one n for all of its transfers.
"""

from collections.abc import Sequence
from typing import Any

import xxhash

from ..communicators import host_memory
from ..communicators.host_memory import memory_of
from .chunks import Chunk, TransferEnd
from .letters import Handle, PeerLinks

# Chunks of one transfer under way at once. So many that a busy machine, on which a thread may wait some milliseconds
# for its core, still has something to send; fewer where each needs host memory beside the device's.
IN_FLIGHT = 64
IN_FLIGHT_OF_DEVICE = 16
# Over links without a thread behind them: while this thread hashes a chunk, only what the sockets hold is on its way.
IN_FLIGHT_OF_PAIR = 2


def move_over_hosts(ends: Sequence[TransferEnd], links: PeerLinks, in_flight: int | None = None) -> None:
    """Move all ranges, in rounds. Runs in repair, in the train thread of all ranks that have a part, or before it.

    `ends` are in the order that all ranks keep, `in_flight` is for links that need another number than gloo's. Raises
    ChecksumMismatch when all are done, and what the links raise.
    """
    if in_flight is None:
        in_flight = IN_FLIGHT if all(end.memory.at_home for end in ends) else IN_FLIGHT_OF_DEVICE
    ranges = [_Range(end, links, in_flight) for end in ends]
    for index in range(in_flight):
        for item in ranges:
            item.post(index)
    for index in range(max((item.rounds for item in ranges), default=0)):
        for item in ranges:
            item.complete(index)
            item.post(index + in_flight)
    for item in ranges:
        if not item.matches:
            raise item.end.changed()


class _Range:
    """One transfer under way: its chunks in order, then a message with the checksum over them."""

    def __init__(self, end: TransferEnd, links: PeerLinks, in_flight: int) -> None:
        self.end = end
        self._in_flight = in_flight
        self.matches = True
        self._sending = end.sending
        self._links = links
        self._memory = end.memory
        self._chunks = end.chunks()
        self._hash = xxhash.xxh3_64()
        self._digest = host_memory.empty((1,), host_memory.dtype_of("int64"))
        self._staging: dict[int, Any] = {}
        self._pending: dict[int, tuple[Handle, Any]] = {}

    @property
    def rounds(self) -> int:
        """How many messages there are: chunks, and the checksum."""
        return len(self._chunks) + 1

    def post(self, index: int) -> None:
        """Start message `index`, if there is one."""
        if index >= self.rounds:
            return
        if index == len(self._chunks):
            if self._sending:
                self._digest[0] = _signed(self._hash.intdigest())
            self._start(index, self._digest)
            return
        chunk = self._chunks[index]
        buffer = self._memory.direct(chunk)
        if buffer is None:
            buffer = self._stage(index, chunk)
            if self._sending:
                self._memory.gather(chunk, buffer)
        self._start(index, buffer)
        if self._sending:
            self._hash.update(memory_of(buffer))  # while it is on its way

    def complete(self, index: int) -> None:
        """Wait for message `index`, if there is one, and take it in."""
        if index >= self.rounds:
            return
        handle, buffer = self._pending.pop(index)
        handle.wait()
        if self._sending:
            return
        if index == len(self._chunks):
            self.matches = int(self._digest[0]) == _signed(self._hash.intdigest())
            return
        chunk = self._chunks[index]
        self._hash.update(memory_of(buffer))
        if self._memory.direct(chunk) is None:
            self._memory.scatter(chunk, buffer)

    def _start(self, index: int, buffer: Any) -> None:
        start = self._links.isend if self._sending else self._links.irecv
        self._pending[index] = (start(buffer, self.end.peer), buffer)

    def _stage(self, index: int, chunk: Chunk) -> Any:
        place = index % self._in_flight  # its last user is done when this one is posted
        held = self._staging.get(place)
        if held is None or len(held) < chunk.length:
            held = self._staging[place] = host_memory.empty_bytes(chunk.length)
        return held[: chunk.length]


def _signed(digest: int) -> int:
    return digest - 2**64 if digest >= 2**63 else digest
