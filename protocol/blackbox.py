"""The black box of a rank: a few pages of shared memory that outlive its process.

A process that is killed says nothing. What must be known of it afterwards, and of a process that hangs, is
therefore written where its agent can read it without asking: the step clock, and the small state that was the
rank's alone. The agent creates one memfd per rank, keeps it over restarts, and passes the descriptor to every
process that holds the rank.

Layout, native byte order and alignment (both ends are on one machine)::

    0      identity    magic, layout version, rank, capacity of a slot
    64     progress    sequence, pid, incarnation, generation, step, activity, collectives,
                       activity_began_s, step_began_s, median_step_s: ten words of 8 bytes
    144    votes       the newest state that passed one, shards here that none can check: each stands alone
    160    reported    sequence, incarnation, step, and up to six values of it, each behind a name of 32 bytes
    448    times       steps, own_us, input_us, wait_us, tokens, stage, as StepTimes: under the sequence of the progress
    496    limit       allowed_s, of the present step: as the times
    512    4 slots     local, local, peer, peer; each a header of 64 bytes and the capacity
           header      state, rank, step, length, write number, xxh3 of (rank, step, blob)

One thread writes at a time. Each word is stored whole, and the sequence is odd while several of them change,
so that a reader sees when it has to look again. A slot's header is written after its data and carries the checksum: a
write that was cut short is never taken for a copy. Of two slots, the one that is worth less is overwritten.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import xxhash

from .bounds import LONGEST_REPORTED, MOST_REPORTED
from .errors import AgentError, RecoveryError
from .reports import ReportedValues
from .types import Activity, LocalStateCopy, RankProgress, StepTimes

_MAGIC = 0x6D69_6473_7465_7031
_VERSION = 3
_IDENTITY = struct.Struct("@4q")
_PROGRESS_BYTES = 64
_PROGRESS = struct.Struct("@7q3d")
_PROGRESS_FIELDS = struct.Struct("@6q3d")
_REPORTED_BYTES = 160
_REPORTED = struct.Struct("@2q")  # behind its sequence
_REPORTED_VALUE = struct.Struct(f"@{LONGEST_REPORTED}sd")
_TIMES = struct.Struct("@6q")
_TIMES_BYTES = 448
_LIMIT_BYTES = 496
_SLOTS_BYTES = 512
_WORD_BYTES = 8
_READ_TRIES = 100
# Where each word of the progress area lies, in words from the start of the memory.
_SEQUENCE = _PROGRESS_BYTES // _WORD_BYTES
_ACTIVITY = _SEQUENCE + 5
_COLLECTIVES = _SEQUENCE + 6
_ACTIVITY_BEGAN = _SEQUENCE + 7
_AGREED = _SEQUENCE + 10
_UNCHECKED = _SEQUENCE + 11
_ALLOWED = _LIMIT_BYTES // _WORD_BYTES
_REPORTED_SEQUENCE = _REPORTED_BYTES // _WORD_BYTES
_REPORTED_END = _REPORTED_BYTES + _WORD_BYTES + _REPORTED.size + MOST_REPORTED * _REPORTED_VALUE.size
_ACTIVITIES = tuple(Activity)
_ACTIVITY_CODES = {activity: code for code, activity in enumerate(_ACTIVITIES, start=1)}
_SLOT_HEADER_BYTES = 64
_SLOT_HEADER = struct.Struct("@5qQ")
_SLOT_KEY = struct.Struct("@2q")
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


class BlackBox:
    """Shared memory of one rank. The agent creates it and reads; the training process attaches and writes.

    Progress is written by the train thread all through a step and costs about a microsecond. Rank-local states are
    written at `ready(s)`, read in repair. Nothing here blocks.
    """

    def __init__(self, fd: int, memory: mmap.mmap, rank: int, capacity_bytes: int) -> None:
        self._fd = fd
        self._memory = memory
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        self._floats = self._bytes.cast("d")
        self._slots = Slots(memory, _SLOTS_BYTES, capacity_bytes)
        self.rank = rank
        self.capacity_bytes = capacity_bytes

    @classmethod
    def create(cls, rank: int, capacity_bytes: int) -> "BlackBox":
        """Make the black box of `rank` with slots of `capacity_bytes`. Runs in the agent, once per rank and
        node. Raises AgentError when the machine has no descriptor or memory for it.
        """
        fd = -1
        try:
            fd = os.memfd_create(f"midstep-rank-{rank}", os.MFD_CLOEXEC)
            size = _SLOTS_BYTES + SLOTS * slot_bytes(capacity_bytes)
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
        except (OSError, OverflowError, ValueError) as error:
            if fd >= 0:
                os.close(fd)
            raise AgentError(
                f"no shared memory for the black box of rank {rank} ({capacity_bytes} bytes a slot): {error}"
            ) from error
        _IDENTITY.pack_into(memory, 0, _MAGIC, _VERSION, rank, capacity_bytes)
        return cls(fd, memory, rank, capacity_bytes)

    @classmethod
    def attach(cls, fd: int) -> "BlackBox":
        """Map the black box behind `fd`, which this object owns from then on. Runs in a training process at
        its start.

        Raises AgentError when the descriptor is no black box of this version.
        """
        try:
            size = os.fstat(fd).st_size
            memory = mmap.mmap(fd, size)
        except (OSError, ValueError) as error:
            raise AgentError(f"descriptor {fd} cannot be mapped as a black box: {error}") from error
        if size >= _SLOTS_BYTES:
            magic, version, rank, capacity_bytes = _IDENTITY.unpack_from(memory, 0)
            expected = _SLOTS_BYTES + SLOTS * slot_bytes(max(0, capacity_bytes))
            if (magic, version, expected) == (_MAGIC, _VERSION, size):
                return cls(fd, memory, rank, capacity_bytes)
        memory.close()
        raise AgentError(
            f"descriptor {fd} is no black box of layout {_VERSION}; agent and training process must run one "
            "version of midstep"
        )

    @property
    def fd(self) -> int:
        """The descriptor to pass on; it stays this object's."""
        return self._fd

    def close(self) -> None:
        """Unmap the memory and close the descriptor. It exists as long as another process has it open.
        Idempotent.
        """
        if self._fd < 0:
            return
        self._slots.release()
        self._floats.release()
        self._words.release()
        self._bytes.release()
        self._memory.close()
        os.close(self._fd)
        self._fd = -1

    # --- the step clock ------------------------------------------------------------

    def write_progress(
        self,
        *,
        pid: int,
        incarnation: int,
        generation: int,
        step: int,
        activity: Activity,
        collectives: int,
        activity_began_s: float,
        step_began_s: float,
        median_step_s: float,
        allowed_s: float = 0.0,
    ) -> None:
        """Write the whole step clock; `*_began_s` are seconds of the monotonic clock. Runs at the start of a
        step.
        """
        # A predecessor may have died with the sequence odd; `| 1` begins from either.
        sequence = self._words[_SEQUENCE] | 1
        self._words[_SEQUENCE] = sequence
        _PROGRESS_FIELDS.pack_into(
            self._memory,
            _PROGRESS_BYTES + _WORD_BYTES,
            pid,
            incarnation,
            generation,
            step,
            _ACTIVITY_CODES[activity],
            collectives,
            activity_began_s,
            step_began_s,
            median_step_s,
        )
        self._floats[_ALLOWED] = allowed_s
        self._words[_SEQUENCE] = sequence + 1

    def set_activity(self, activity: Activity, now_s: float) -> None:
        """Write what the train thread does from `now_s` (monotonic) on."""
        sequence = self._words[_SEQUENCE] | 1
        self._words[_SEQUENCE] = sequence
        self._words[_ACTIVITY] = _ACTIVITY_CODES[activity]
        self._floats[_ACTIVITY_BEGAN] = now_s
        self._words[_SEQUENCE] = sequence + 1

    def set_allowed(self, allowed_s: float) -> None:
        """Write how long the present step may take; 0: the policy says so."""
        self._floats[_ALLOWED] = allowed_s

    def set_collectives(self, count: int) -> None:
        """Write how many collectives the train thread has entered in this generation."""
        self._words[_COLLECTIVES] = count

    def set_votes(self, agreed_step: int, unchecked: int) -> None:
        """Write which state has passed the last vote, and how many shards here no vote can check."""
        self._words[_AGREED], self._words[_UNCHECKED] = agreed_step, unchecked

    def set_reported(self, incarnation: int, step: int, values: Mapping[str, float]) -> None:
        """Write what the script has reported of a step: the first few values whose names are short enough."""
        short = [(name.encode(), value) for name, value in values.items() if len(name.encode()) <= LONGEST_REPORTED]
        packed = _REPORTED.pack(incarnation, step)
        packed += b"".join(_REPORTED_VALUE.pack(name, value) for name, value in short[:MOST_REPORTED])
        start = _REPORTED_BYTES + _WORD_BYTES
        self._words[_REPORTED_SEQUENCE] |= 1
        self._bytes[start:_REPORTED_END] = packed.ljust(_REPORTED_END - start, b"\0")
        self._words[_REPORTED_SEQUENCE] += 1

    def read_reported(self) -> ReportedValues | None:
        """Read what was reported last; None: nothing was, or a writer is, or was stopped, in the middle of it."""
        before = self._words[_REPORTED_SEQUENCE]
        packed = bytes(self._bytes[_REPORTED_BYTES + _WORD_BYTES : _REPORTED_END])
        if not before or before & 1 or self._words[_REPORTED_SEQUENCE] != before:
            return None
        incarnation, step = _REPORTED.unpack_from(packed)
        values = {
            name.rstrip(b"\0").decode("utf-8", "replace"): value
            for name, value in _REPORTED_VALUE.iter_unpack(packed[_REPORTED.size :])
            if name.rstrip(b"\0")
        }
        return ReportedValues(self.rank, incarnation, step, values)

    def set_times(self, times: StepTimes) -> None:
        """Write the time of all steps so far, by what was done in it. Runs at the end of a step."""
        sequence = self._words[_SEQUENCE] | 1
        self._words[_SEQUENCE] = sequence
        fields = (times.steps, times.own_us, times.input_us, times.wait_us, times.tokens, times.stage)
        _TIMES.pack_into(self._memory, _TIMES_BYTES, *fields)
        self._words[_SEQUENCE] = sequence + 1

    def _read_times(self) -> StepTimes | None:
        """Read the time of all steps; None where no step has one, or a writer is in between."""
        for _ in range(_READ_TRIES):
            sequence = self._words[_SEQUENCE]
            times = StepTimes(*_TIMES.unpack_from(self._memory, _TIMES_BYTES))
            if sequence == self._words[_SEQUENCE] and not sequence & 1:
                return times if times.steps > 0 else None
        return None

    def read_progress(self, now_s: float) -> RankProgress | None:
        """Read the step clock at `now_s` (monotonic); None when it was never written.

        A writer that was stopped or killed between two words leaves them as they are: the answer is then the
        words as they stand, since the clock of a process that hangs is what is wanted most.
        """
        allowed_s = self._floats[_ALLOWED]  # before the rest: the next step's limit must not go with this one's age
        fields, _ = self.read_clock()
        _, _, incarnation, generation, step, code, collectives, activity_began, step_began, median = fields
        if not 1 <= code <= len(_ACTIVITIES):
            return None
        return RankProgress(
            rank=self.rank,
            incarnation=incarnation,
            generation=generation,
            step=step,
            activity=_ACTIVITIES[code - 1],
            collectives=collectives,
            activity_age_s=max(0.0, now_s - activity_began),
            step_age_s=max(0.0, now_s - step_began),
            median_step_s=median,
            allowed_s=allowed_s,
            agreed_step=max(0, self._words[_AGREED]),
            unchecked=max(0, self._words[_UNCHECKED]),
            times=self._read_times(),
        )

    def read_clock(self) -> tuple[tuple[Any, ...], bool]:
        """Return the words of the step clock, and whether they belong together: no writer was in between them."""
        fields = _PROGRESS.unpack_from(self._memory, _PROGRESS_BYTES)
        for _ in range(_READ_TRIES):
            again = _PROGRESS.unpack_from(self._memory, _PROGRESS_BYTES)
            if fields == again and not fields[0] & 1:
                return fields, True
            fields = again
        return fields, False

    # --- rank-local states ------------------------------------------------------------

    def write_local(self, step: int, blob: bytes) -> None:
        """Keep the rank-local state of this rank as of `step` committed updates, in place of the older of the two
        kept.

        Copies of later steps are dropped: they belong to updates that were rolled back. Raises RecoveryError
        when the blob is bigger than a slot.
        """
        self._slots.write(LOCAL_SLOTS, self.rank, step, blob)

    def write_peer(self, rank: int, step: int, blob: bytes) -> None:
        """Keep a copy of the rank-local state of `rank`, for which this rank is the buddy. Else as `write_local`."""
        self._slots.write(PEER_SLOTS, rank, step, blob)

    def read_local(self, step: int) -> bytes | None:
        """Read this rank's local state as of `step`; None when no whole copy of it is here."""
        return self._slots.read(LOCAL_SLOTS, self.rank, step)

    def read_peer(self, rank: int, step: int) -> bytes | None:
        """Read the copy of `rank`'s local state as of `step`; None when no whole copy of it is here."""
        return self._slots.read(PEER_SLOTS, rank, step)

    def copies(self) -> tuple[LocalStateCopy, ...]:
        """Return which rank-local states can be read here whole, this rank's and the peer copy. For barrier one."""
        return self._slots.copies()


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
