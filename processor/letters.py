"""Small messages of a repair, of unknown length: headers, rank-local states, checksums. Always from host to host."""

import struct
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from ..communicators import host_memory
from ..communicators.host_memory import memory_of
from ..protocol.errors import ChecksumMismatch

if TYPE_CHECKING:
    import torch

FIRST_BYTES = 16 * 1024  # of a letter: most need no second message

_HEAD = struct.Struct("<QQ")


class Handle(Protocol):
    """A send or receive under way."""

    def wait(self) -> Any:
        """Return when it is done; raises when it failed or was aborted."""
        ...


class PeerLinks(Protocol):
    """What a transfer between hosts needs of a communicator."""

    def isend(self, tensor: "torch.Tensor", rank: int) -> Handle:
        """Start sending a CPU tensor."""
        ...

    def irecv(self, tensor: "torch.Tensor", rank: int) -> Handle:
        """Start receiving into a CPU tensor."""
        ...


class Letters:
    """Small messages of unknown length: a first one of fixed size, with length and checksum, and a rest if need be."""

    def __init__(self, rank: int, links: PeerLinks) -> None:
        self._rank = rank
        self._links = links
        self._sent: list[tuple[Handle, Any]] = []
        self.bytes_received = 0

    def send(self, data: bytes, rank: int) -> None:
        """Start sending; never waits."""
        letter = _HEAD.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data
        whole = host_memory.from_bytes(bytearray(letter.ljust(FIRST_BYTES, b"\0")))
        for tensor in (whole[:FIRST_BYTES], whole[FIRST_BYTES:]):
            if len(tensor):
                self._sent.append((self._links.isend(tensor, rank), tensor))

    def receive(self, rank: int, what: str) -> bytes:
        """Return what `rank` sends next. Raises ChecksumMismatch."""
        first = self._take(FIRST_BYTES, rank)
        length, digest = _HEAD.unpack_from(first)
        end = _HEAD.size + length
        data = first[_HEAD.size : end]
        if end > FIRST_BYTES:
            data += self._take(end - FIRST_BYTES, rank)
        self.bytes_received += length
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise ChecksumMismatch(f"{what}, {length} bytes from rank {rank} to rank {self._rank}, arrived changed")
        return data

    def _take(self, length: int, rank: int) -> bytes:
        tensor = host_memory.empty_bytes(length)
        self._links.irecv(tensor, rank).wait()
        return bytes(memory_of(tensor))

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for handle, _ in self._sent:
            handle.wait()
        self._sent.clear()
