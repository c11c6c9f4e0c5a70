"""Read ranges of shards out of the memory of a source that is a process of the same host.

The kernel copies from one process into the other (`process_vm_readv`), once, where a socket copies twice and takes both
processes for it. The source hashes its own range meanwhile. Neither the plan nor the policy knows of this: it is found
out between each two ranks, and where it cannot be the range moves over their link.

Each two ranks tell each other on which host they are. A source on the same one offers: where its tensors lie, and a
number that is at a place in its memory. The destination reads that number first, as a process id means nothing in
another container, and answers whether it could: it may be that the kernel does not allow it (Yama, seccomp, another
user). If so, the source hashes its range while the destination reads it, chunk by chunk at both ends, each in as many
threads as are worth it. The destination compares the hashes, and says which end it came to; until then the source
changes nothing. Where the number can be read and the tensors cannot (memory of a driver), the source sends the range.

Why this cannot deadlock: every rank sends what it has to say in one stage before it waits in the next, and nothing that
it sends in a stage depends on what it waits for there.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from ..communicators.host_memory import memory_at
from ..protocol.compat import StrEnum
from ..protocol.errors import RecoveryError
from ..protocol.types import ShardTransfer
from .range_transfer import Chunk, Letters, TransferEnd

LEAST_BYTES = 1024 * 1024  # from one rank to another; less is not worth the letters
MOST_THREADS = 4  # of one rank: others of this host read and hash at the same time
THREAD_BYTES = 16 * 1024 * 1024  # some milliseconds of work; for less a thread of its own is not worth it
_MOST_PIECES = 1024  # of one call; the kernel takes no more
_NUMBER_BYTES = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_ASKS = "1"  # only a child may be read, or what the process allows to read it
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "process_vm_readv"):
    _pieces = (ctypes.c_void_p, ctypes.c_ulong)
    _libc.process_vm_readv.argtypes = (ctypes.c_int, *_pieces, *_pieces, ctypes.c_ulong)
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
    """A range that is offered: where the tensors of its shard lie, and how long they are."""

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The ranges that a source lets a destination read; `number` lies at `address`. No ranges: none can be read."""

    address: int
    number: bytes
    ranges: tuple[Range, ...]


class OfferAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The destination's word on an offer: whether it could read the number, and so will read the ranges."""

    reads: bool


class Digests(msgspec.Struct, frozen=True, array_like=True):
    """The hashes of what was offered, in its order: of each chunk of each range."""

    digests: tuple[int, ...]


def this_host() -> str:
    """Return a name of this host and of the namespace of its process ids; empty where nothing can be read."""
    if not hasattr(_libc, "process_vm_readv"):
        return ""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class MemoryReads:
    """The ranges of one rank that move so. Each method is called once, in this order, in the thread that moves shards.

    All of them raise what the links raise, and ChecksumMismatch for a letter that was changed on its way.
    """

    def __init__(self, rank: int, transfers: Sequence[ShardTransfer], letters: Letters, *, host: str) -> None:
        """`host`: as `this_host` returns it."""
        self._rank = rank
        self._letters = letters
        self._hello = Hello(host, os.getpid())
        self._sent = _by_peer((t.destination, t) for t in transfers if t.source == rank)
        self._received = _by_peer((t.source, t) for t in transfers if t.source != rank)
        self._number = ctypes.create_string_buffer(secrets.token_bytes(_NUMBER_BYTES), _NUMBER_BYTES)
        self._near: dict[int, int] = {}  # the processes of peers on this host
        self._offered: list[int] = []  # to which peers
        self._taken: dict[int, Offer] = {}  # by the peer that offers
        self.moved: set[ShardTransfer] = set()  # all others have to move over links
        self.changed: list[TransferEnd] = []  # what arrived with another checksum
        self.bytes_read = 0

    def greet(self) -> None:
        """Tell peers on which host this rank is. Before all that takes time, so that they need not wait for it."""
        for peer in self._peers:
            self._say(self._hello, peer)

    def offer(self, sent: Iterable[TransferEnd]) -> None:
        """Offer peers on this host what they are to receive, of the ends `sent`."""
        heard = {peer: self._hear(peer, Hello) for peer in self._peers}
        self._near = {p: hello.pid for p, hello in heard.items() if hello.host and hello.host == self._hello.host}
        ends = {end.transfer: end for end in sent}
        for peer, transfers in self._sent.items():
            if peer in self._near:
                offer = self._offer_of([ends[transfer] for transfer in transfers], self._near[peer])
                self._say(offer, peer)
                if offer.ranges:
                    self._offered.append(peer)

    def answer(self) -> None:
        """Find out which offers can be taken, and say so: what is taken is hashed from here on."""
        for peer in self._received:
            if peer not in self._near:
                continue
            offer = self._hear(peer, Offer)
            if offer.ranges:
                answer = OfferAnswer(_readable(self._near[peer], offer))
                self._say(answer, peer)
                if answer.reads:
                    self._taken[peer] = offer

    def move(self, ends: Iterable[TransferEnd]) -> None:
        """Read what can be read, and let others read, of all `ends` of this rank."""
        found = {end.transfer: end for end in ends}
        readers = [peer for peer in self._offered if self._hear(peer, OfferAnswer).reads]
        for peer in readers:
            self._say(Digests(tuple(_hashes([found[transfer] for transfer in self._sent[peer]]))), peer)
        self._read({peer: [found[transfer] for transfer in self._received[peer]] for peer in self._taken})
        for peer in readers:
            if self._hear(peer, ReadOutcome) is not ReadOutcome.REFUSED:
                self.moved.update(self._sent[peer])
        self._letters.finish()

    @property
    def _peers(self) -> list[int]:
        return sorted({*self._sent, *self._received})

    def _offer_of(self, ends: Sequence[TransferEnd], pid: int) -> Offer:
        if not all(end.memory.at_home for end in ends):
            return Offer(0, b"", ())
        _allow(pid)
        ranges = tuple(Range(tuple(end.memory.addresses), tuple(end.memory.sizes)) for end in ends)
        return Offer(ctypes.addressof(self._number), self._number.raw, ranges)

    def _read(self, received: dict[int, list[TransferEnd]]) -> None:
        """Read what sources offer, from all of them at once, and say to each of them how that ended."""
        readings = [
            _Reading(peer, self._near[peer], there, end)
            for peer, ends in received.items()
            for there, end in zip(self._taken[peer].ranges, ends, strict=True)
        ]
        chunks = [(reading, index) for reading in readings for index in range(len(reading.chunks))]
        size_bytes = sum(reading.end.transfer.length_bytes for reading in readings)
        _in_threads(lambda each: each[0].bring(each[1]), chunks, size_bytes)
        for peer in received:
            theirs = self._hear(peer, Digests).digests
            self._say(self._compare([each for each in readings if each.peer == peer], theirs), peer)

    def _compare(self, readings: Sequence["_Reading"], theirs: Sequence[int]) -> ReadOutcome:
        """Return how the reading from one source ended, whose hashes are `theirs`."""
        if any(None in reading.hashes for reading in readings):
            return ReadOutcome.REFUSED
        left = iter(theirs)
        changed = [each.end for each in readings if each.hashes != list(islice(left, len(each.hashes)))]
        self.changed += changed
        self.moved.update(each.end.transfer for each in readings)
        self.bytes_read += sum(each.end.transfer.length_bytes for each in readings)
        return ReadOutcome.CHANGED if changed else ReadOutcome.READ

    def _say(self, letter: Any, peer: int) -> None:
        self._letters.send(msgspec.msgpack.encode(letter), peer)

    def _hear(self, peer: int, kind: type[_Letter]) -> _Letter:
        data = self._letters.receive(peer, f"a letter ({kind.__name__})")
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise RecoveryError(f"rank {self._rank} expects {kind.__name__} from rank {peer}: {error}") from error


class _Reading:
    """A range that is read out of the memory of a process, by chunks in any order and thread."""

    def __init__(self, peer: int, pid: int, there: Range, end: TransferEnd) -> None:
        self.peer = peer
        self.end = end
        self.chunks = end.chunks()
        self.hashes: list[int | None] = [None] * len(self.chunks)  # None: it could not be read
        self._pid = pid
        self._there = there.addresses
        self._here = end.memory.addresses
        self._fits = list(there.sizes) == end.memory.sizes and end.memory.at_home

    def bring(self, index: int) -> None:
        """Read a chunk, and hash it while it is in the processor's cache."""
        if not self._fits:
            return
        pieces, there, here = self.chunks[index].pieces, self._there, self._here
        places = [(there[tensor] + start, here[tensor] + start, length) for tensor, start, length in pieces]
        try:
            for first in range(0, len(places), _MOST_PIECES):
                _copy(self._pid, places[first : first + _MOST_PIECES])
        except OSError:
            return
        self.hashes[index] = _hash_of(here, self.chunks[index])


def _by_peer(transfers: Iterable[tuple[int, ShardTransfer]]) -> dict[int, list[ShardTransfer]]:
    """Sort transfers by their peer, without those that are not worth it: the same at the other end."""
    found: dict[int, list[ShardTransfer]] = {}
    for peer, transfer in transfers:
        found.setdefault(peer, []).append(transfer)
    return {
        peer: found[peer]
        for peer in sorted(found)
        if sum(transfer.length_bytes for transfer in found[peer]) >= LEAST_BYTES
    }


def _allow(pid: int) -> None:
    """Let a process of this host read this one, where the kernel asks for that. It may stay so: it is of this job."""
    with contextlib.suppress(OSError):
        if _YAMA.read_text().strip() == _YAMA_ASKS:
            _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)  # where this fails, reading is refused


def _readable(pid: int, offer: Offer) -> bool:
    """Return whether a process of that id can be read, and is the one that offers."""
    number = ctypes.create_string_buffer(_NUMBER_BYTES)
    try:
        _copy(pid, [(offer.address, ctypes.addressof(number), _NUMBER_BYTES)])
    except OSError:
        return False
    return number.raw == offer.number


def _hashes(ends: Sequence[TransferEnd]) -> list[int]:
    """Hash the ranges that this rank sends, where they lie, by chunks."""
    lying = [(end.memory.addresses, end.chunks()) for end in ends]
    chunks = [(addresses, chunk) for addresses, cut in lying for chunk in cut]
    found = [0] * len(chunks)

    def one(index: int) -> None:
        found[index] = _hash_of(*chunks[index])

    _in_threads(one, range(len(chunks)), sum(end.transfer.length_bytes for end in ends))
    return found


def _hash_of(addresses: Sequence[int], chunk: Chunk) -> int:
    digest = xxhash.xxh3_64()
    for tensor, start, length in chunk.pieces:
        digest.update(memory_at(addresses[tensor] + start, length))
    return digest.intdigest()


def _copy(pid: int, places: Sequence[tuple[int, int, int]]) -> None:
    """Copy bytes of another process: from where, to where, how many. Raises OSError."""
    table = np.array(places, np.uintp)
    there, here = np.ascontiguousarray(table[:, [0, 2]]), np.ascontiguousarray(table[:, 1:])
    count = len(places)
    copied = _libc.process_vm_readv(pid, here.ctypes.data, count, there.ctypes.data, count, 0)
    if copied != sum(length for *_, length in places):
        code = ctypes.get_errno() if copied < 0 else errno.EFAULT
        raise OSError(code, os.strerror(code))


def _in_threads(work: Callable[[Any], None], items: Iterable[Any], size_bytes: int) -> None:
    """Do `work` with each item, in this thread and others if that pays for so many bytes. Raises what it raises."""
    left, lock = deque(items), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if not left:
                    return
                item = left.popleft()
            work(item)

    more = min(MOST_THREADS, len(os.sched_getaffinity(0)), -(-size_bytes // THREAD_BYTES)) - 1
    if more <= 0:
        run()
        return
    with ThreadPoolExecutor(more, "midstep-read") as pool:
        others = [pool.submit(run) for _ in range(more)]
        run()
        for each in others:
            each.result()
