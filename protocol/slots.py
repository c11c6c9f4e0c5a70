"""Four slots of a rank's black box: copies of rank-local states, of which no torn one is ever read.

A slot's header is written after its data and carries the checksum: a write that was cut short is never taken for a
copy. Of two slots, the one that is worth less is given up.
"""

import mmap
import struct
from typing import NamedTuple

import xxhash

from .errors import RecoveryError
from .types import LocalStateCopy

_SLOT_HEADER_BYTES = 64
_SLOT_HEADER = struct.Struct("@5qQ")
_SLOT_KEY = struct.Struct("@2q")
_WORD_BYTES = 8
_SLOT_EMPTY, _SLOT_WRITTEN = 0, 1

SLOTS = 4
LOCAL_SLOTS = (0, 1)
PEER_SLOTS = (2, 3)


class _SlotHeader(NamedTuple):
    """One slot's header as it was read."""

    state: int
    rank: int
    step: int
    length: int
    number: int
    checksum: int

    def holds(self, rank: int, step: int) -> bool:
        return self.state == _SLOT_WRITTEN and (self.rank, self.step) == (rank, step)


class Slots:
    """The slots in the memory of one black box, from `start` on. Nothing here blocks."""

    def __init__(self, memory: mmap.mmap, start: int, capacity_bytes: int) -> None:
        self._memory = memory
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        self._start = start
        self._capacity_bytes = capacity_bytes

    def release(self) -> None:
        """Let go of the memory, so that it can be unmapped."""
        self._words.release()
        self._bytes.release()

    def copies(self) -> tuple[LocalStateCopy, ...]:
        """Return which rank-local states can be read here whole."""
        found = []
        for slot in LOCAL_SLOTS + PEER_SLOTS:
            header = self._header(slot)
            if header.state == _SLOT_WRITTEN and self._blob(slot, header) is not None:
                found.append(LocalStateCopy(rank=header.rank, step=header.step))
        return tuple(sorted(found, key=lambda copy: (copy.rank, copy.step)))

    def write(self, slots: tuple[int, int], rank: int, step: int, blob: bytes) -> None:
        """Keep a local state as of `step` in one of two slots; raise RecoveryError when it is bigger than a slot."""
        if len(blob) > self._capacity_bytes:
            raise RecoveryError(
                f"the rank-local state of rank {rank} at step {step} takes {len(blob)} bytes, and a slot of "
                f"the black box {self._capacity_bytes}; raise `black_box_bytes` in the policy, or register "
                "less as a rank's own"
            )
        headers = [self._header(slot) for slot in slots]
        chosen = 0 if _worth(headers[0], rank, step) <= _worth(headers[1], rank, step) else 1
        slot, other = slots[chosen], slots[1 - chosen]
        self._set_state(slot, _SLOT_EMPTY)
        start = self._slot_start(slot)
        data = start + _SLOT_HEADER_BYTES
        self._bytes[data : data + len(blob)] = blob
        number = 1 + max(headers[0].number, headers[1].number)
        checksum = _checksum(rank, step, blob)
        _SLOT_HEADER.pack_into(self._memory, start, _SLOT_WRITTEN, rank, step, len(blob), number, checksum)
        if headers[1 - chosen].step > step:
            self._set_state(other, _SLOT_EMPTY)

    def read(self, slots: tuple[int, ...], rank: int, step: int) -> bytes | None:
        """Read the rank-local state of `rank` as of `step`; None when no whole copy of it is in these slots."""
        for slot in slots:
            header = self._header(slot)
            if header.holds(rank, step):
                blob = self._blob(slot, header)
                if blob is not None:
                    return blob
        return None

    def _header(self, slot: int) -> _SlotHeader:
        return _SlotHeader(*_SLOT_HEADER.unpack_from(self._memory, self._slot_start(slot)))

    def _blob(self, slot: int, header: _SlotHeader) -> bytes | None:
        """Return the slot's bytes if they are what its header says, else None."""
        if not 0 <= header.length <= self._capacity_bytes:
            return None
        data = self._slot_start(slot) + _SLOT_HEADER_BYTES
        blob = bytes(self._bytes[data : data + header.length])
        return blob if _checksum(header.rank, header.step, blob) == header.checksum else None

    def _set_state(self, slot: int, state: int) -> None:
        self._words[self._slot_start(slot) // _WORD_BYTES] = state

    def _slot_start(self, slot: int) -> int:
        return self._start + slot * slot_bytes(self._capacity_bytes)


def slot_bytes(capacity_bytes: int) -> int:
    """Size of a slot with its header, rounded up so that the next header is aligned to it."""
    return _SLOT_HEADER_BYTES + -(-capacity_bytes // _SLOT_HEADER_BYTES) * _SLOT_HEADER_BYTES


def _checksum(rank: int, step: int, blob: bytes) -> int:
    digest = xxhash.xxh3_64(_SLOT_KEY.pack(rank, step))
    digest.update(blob)
    return digest.intdigest()


def _worth(header: _SlotHeader, rank: int, step: int) -> tuple[int, int]:
    """Order slots by what is given up first: the same step, an empty one or another rank's, the older write.

    The same step comes first so that no second copy of it, outdated, stays behind.
    """
    if header.holds(rank, step):
        return (0, header.number)
    if header.state != _SLOT_WRITTEN or header.rank != rank:
        return (1, header.number)
    return (2, header.number)
