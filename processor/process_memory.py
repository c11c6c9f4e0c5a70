"""Read ranges of shards out of the memory of a source that is a process of the same host.

The kernel copies from one process into the other (`process_vm_readv`), once, where a socket copies twice and takes both
processes for it. The source hashes its own range meanwhile, so each end does half of the work. Neither the plan nor the
policy knows of this: it is found out between each two ranks, and where it cannot be the range moves over their link.

Each two ranks tell each other on which host they are. A source on the same one offers: where its tensors lie, and a
number that is at a place in its memory. The destination reads that number first: a process id means nothing in another
container. Then it reads the range, compares hashes, and says which end it came to; until then the source changes
nothing. It may be that the kernel does not allow it (Yama, seccomp, another user, memory of a driver): then the source
sends the range.

Why this cannot deadlock: every rank sends what it has to say in one stage before it waits in the next, and nothing that
it sends in a stage depends on what it waits for there.
"""

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from ..communicators.host_memory import address_of, memory_of
from ..protocol.compat import StrEnum
from ..protocol.errors import RecoveryError
from .range_transfer import Letters, TensorRange, TransferEnd

LEAST_BYTES = 1024 * 1024  # from one rank to another; less is not worth the letters
_MOST_PIECES = 1024  # of one call; the kernel takes no more
_NUMBER_BYTES = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_ASKS = "1"  # only a child may be read, or what the process allows to read it
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "process_vm_readv"):
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
_Letter = TypeVar("_Letter")


class ReadOutcome(StrEnum):
    """The end that a destination came to."""

    READ = "read"
    CHANGED = "changed"  # read, and not what the source has hashed
    REFUSED = "refused"  # the kernel does not allow it: the range has to be sent


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The host of a rank, and its process there. An empty host: nothing can be read on it."""

    host: str
    pid: int


class Range(msgspec.Struct, frozen=True, array_like=True):
    """A range that is offered: where the tensors of its shard lie, how long they are, and its hash."""

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The ranges that a source lets a destination read; `number` lies at `address`. No ranges: none can be read."""

    address: int
    number: bytes
    ranges: tuple[Range, ...]


class Digests(msgspec.Struct, frozen=True, array_like=True):
    """The hashes of what was offered, in its order."""

    digests: tuple[int, ...]


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def this_host() -> str:
    """Return a name of this host and of the namespace of its process ids; empty where nothing can be read."""
    if not hasattr(_libc, "process_vm_readv"):
        return ""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class MemoryReads:
    """The ranges of one rank that move so. `move` is called once, in the thread that moves shards."""

    def __init__(self, rank: int, ends: Sequence[TransferEnd], letters: Letters, *, host: str) -> None:
        """`host`: as `this_host` returns it."""
        self._rank = rank
        self._ends = ends
        self._letters = letters
        self._hello = Hello(host, os.getpid())
        self._sent = _by_peer(end for end in ends if end.sending)
        self._received = _by_peer(end for end in ends if not end.sending)
        self._number = ctypes.create_string_buffer(secrets.token_bytes(_NUMBER_BYTES), _NUMBER_BYTES)
        self._moved: list[TransferEnd] = []
        self.bytes_read = 0
        self.changed: list[TransferEnd] = []

    def move(self) -> list[TransferEnd]:
        """Read what can be read, and let others read; return the ends of what has to move over links.

        What arrived with another checksum is in `changed`. Raises what the links raise, and ChecksumMismatch for a
        letter that was changed on its way.
        """
        near = self._near()
        offers = {peer: self._offer(peer, near[peer]) for peer in self._sent if peer in near}
        for peer, offer in offers.items():
            self._say(offer, peer)
        for peer, offer in offers.items():
            self._say(Digests(tuple(map(_digest_of, self._sent[peer])) if offer.ranges else ()), peer)
        for peer, ends in self._received.items():
            if peer in near and self._take(peer, near[peer], ends):
                self._moved += ends
        for peer in offers:
            if self._hear(peer, ReadOutcome) is not ReadOutcome.REFUSED:
                self._moved += self._sent[peer]
        self._letters.finish()
        moved = set(map(id, self._moved))
        return [end for end in self._ends if id(end) not in moved]

    def _near(self) -> dict[int, Hello]:
        """Return the peers on this host."""
        peers = sorted({*self._sent, *self._received})
        for peer in peers:
            self._say(self._hello, peer)
        heard = {peer: self._hear(peer, Hello) for peer in peers}
        return {peer: hello for peer, hello in heard.items() if hello.host and hello.host == self._hello.host}

    def _offer(self, peer: int, hello: Hello) -> Offer:
        ends = self._sent[peer]
        if not all(end.memory.at_home for end in ends):
            return Offer(0, b"", ())
        _allow(hello.pid)
        ranges = tuple(Range(tuple(map(address_of, end.memory.flat)), tuple(end.memory.sizes)) for end in ends)
        return Offer(ctypes.addressof(self._number), self._number.raw, ranges)

    def _take(self, peer: int, hello: Hello, ends: Sequence[TransferEnd]) -> bool:
        """Read what a source offers, and say how that ended; return whether its ranges are here."""
        read = _read(hello.pid, self._hear(peer, Offer), ends)
        digests, outcome = self._hear(peer, Digests).digests, ReadOutcome.REFUSED
        if read is not None:
            changed = [end for end, own, theirs in zip(ends, read, digests, strict=True) if own != theirs]
            self.changed += changed
            outcome = ReadOutcome.CHANGED if changed else ReadOutcome.READ
            self.bytes_read += sum(end.transfer.length_bytes for end in ends)
        self._say(outcome, peer)
        return outcome is not ReadOutcome.REFUSED

    def _say(self, letter: Any, peer: int) -> None:
        self._letters.send(msgspec.msgpack.encode(letter), peer)

    def _hear(self, peer: int, kind: type[_Letter]) -> _Letter:
        data = self._letters.receive(peer, f"a letter ({kind.__name__})")
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise RecoveryError(f"rank {self._rank} expects {kind.__name__} from rank {peer}: {error}") from error


def _by_peer(ends: Iterable[TransferEnd]) -> dict[int, list[TransferEnd]]:
    """Sort ends by their peer, without those that are not worth it: the same at the other end."""
    found: dict[int, list[TransferEnd]] = {}
    for end in ends:
        found.setdefault(end.peer, []).append(end)
    return {
        peer: found[peer]
        for peer in sorted(found)
        if sum(end.transfer.length_bytes for end in found[peer]) >= LEAST_BYTES
    }


def _allow(pid: int) -> None:
    """Let a process of this host read this one, where the kernel asks for that. It may stay so: it is of this job."""
    with contextlib.suppress(OSError):
        if _YAMA.read_text().strip() == _YAMA_ASKS:
            _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)  # where this fails, reading is refused


def _digest_of(end: TransferEnd) -> int:
    """Hash the range that this rank sends, where it lies."""
    digest = xxhash.xxh3_64()
    for chunk in end.chunks():
        for piece in chunk.pieces:
            digest.update(memory_of(end.memory.view(piece)))
    return digest.intdigest()


def _read(pid: int, offer: Offer, ends: Sequence[TransferEnd]) -> list[int] | None:
    """Read the ranges into their memory here, and return the hash of each. None: they cannot be read."""
    if len(offer.ranges) != len(ends):
        return None
    pairs = list(zip(offer.ranges, ends, strict=True))
    if not all(list(there.sizes) == end.memory.sizes and end.memory.at_home for there, end in pairs):
        return None
    number = ctypes.create_string_buffer(_NUMBER_BYTES)
    try:
        _copy(pid, [(offer.address, ctypes.addressof(number), _NUMBER_BYTES)])
        if number.raw != offer.number:
            return None  # another process has that id here
        return [_read_range(pid, there.addresses, end) for there, end in pairs]
    except OSError:
        return None


def _read_range(pid: int, addresses: Sequence[int], end: TransferEnd) -> int:
    """Read a range chunk by chunk, each hashed while it is in the processor's cache. Raises OSError."""
    digest, memory = xxhash.xxh3_64(), end.memory
    here = list(map(address_of, memory.flat))

    def place(piece: TensorRange) -> tuple[int, int, int]:
        return addresses[piece.tensor] + piece.start, here[piece.tensor] + piece.start, piece.length

    for chunk in end.chunks():
        for first in range(0, len(chunk.pieces), _MOST_PIECES):
            pieces = chunk.pieces[first : first + _MOST_PIECES]
            _copy(pid, list(map(place, pieces)))
            for piece in pieces:
                digest.update(memory_of(memory.view(piece)))
    return digest.intdigest()


def _copy(pid: int, places: Sequence[tuple[int, int, int]]) -> None:
    """Copy bytes of another process: from where, to where, how many. Raises OSError."""
    pieces = _Piece * len(places)
    there = pieces(*(_Piece(source, length) for source, _, length in places))
    here = pieces(*(_Piece(target, length) for _, target, length in places))
    count = ctypes.c_ulong(len(places))
    copied = _libc.process_vm_readv(pid, here, count, there, count, ctypes.c_ulong(0))
    if copied != sum(length for *_, length in places):
        code = ctypes.get_errno() if copied < 0 else errno.EFAULT
        raise OSError(code, os.strerror(code))
