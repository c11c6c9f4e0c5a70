"""The journal of a job in a folder that several machines share: the first to make an entry's number has written it.

Each write is one file that is made only where there is none of its number. A controller that was deposed finds that
number taken, whatever it believes and however long it stood still: no clock decides, and no lock of the file system.

An entry that its controller could not be sure of, since the file system failed while it was made, is passed over: the
next entry says after which one it follows.
"""

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from ...policies.schema import Policy
from ...protocol.errors import ElectionLost, JournalError, JournalSuperseded, StoreUnreachable
from ...protocol.types import JobSpec
from ..clock import HeardClock
from ..election.election import Election, Leadership
from .journal import Journal, Limits, new_founding, open_journal
from .numbered_files import NumberedFiles, link_whole, read_whole
from .records import End, EventRow, ReplayStart, SavedSnapshot, TakenIn, TermRecord, damaged, link
from .volume_place import ENTRIES, FOUNDING

SNAPSHOTS = "snapshots"
LIMITS = Limits(events=500)  # in entries, each a file that a takeover opens
TRIES = 3  # of one write, when an earlier one is found to have been carried out
REMOVED_AT_ONCE = 20  # entries in one turn
LOOK_S = 1.0  # between two looks for a later term
_LEVEL = 1  # of compression: the controller waits for it

_log = logging.getLogger(__name__)


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Events of a term; none where it begins."""

    term: TermRecord
    rows: list[EventRow]


class _Written(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`after`: the number of the entry that it follows on, whose hash is `before`."""

    after: int
    before: bytes
    body: bytes
    digest: bytes


class _Snapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seq: int
    chain: bytes
    entry: bytes
    state: bytes
    taken_in: bytes
    digest: bytes


class Mark(msgspec.Struct, frozen=True):
    """An entry by its number and hash. Number 0 with the origin: in front of all of them."""

    number: int
    digest: bytes


class LogEntry(msgspec.Struct, frozen=True):
    """An entry that is what was written, with its own mark and the one that it follows on."""

    mark: Mark
    after: Mark
    body: Body

    @property
    def last(self) -> tuple[int, bytes]:
        """Number and hash of the last event up to here."""
        rows, term = self.body.rows, self.body.term
        return (rows[-1].seq, rows[-1].chain) if rows else (term.events, term.last)


_encode = msgspec.msgpack.Encoder().encode
_decode_written = msgspec.msgpack.Decoder(_Written).decode
_decode_body = msgspec.msgpack.Decoder(Body).decode
_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode


def _pack(number: int, after: Mark, body: Body) -> tuple[bytes, Mark]:
    """Return an entry as a file, and its mark."""
    packed = zlib.compress(_encode(body), _LEVEL)
    digest = link(after.digest, number, after.number, packed)
    return _encode(_Written(after.number, after.digest, packed, digest)), Mark(number, digest)


def _read_entry(log: NumberedFiles, number: int) -> LogEntry | None:
    """Return an entry; None when there is none. Raises JournalDamaged, StoreUnreachable."""
    content = log.read(number)
    if content is None:
        return None
    try:
        written = _decode_written(content)
        if written.digest != link(written.before, number, written.after, written.body):
            raise ValueError("its hash is another one")
        body = _decode_body(zlib.decompress(written.body))
    except (ValueError, zlib.error, msgspec.MsgspecError) as error:
        raise damaged(log, f"entry {number} is not what was written ({error})") from error
    return LogEntry(Mark(number, written.digest), Mark(written.after, written.before), body)


def _newest(log: NumberedFiles, origin: bytes) -> LogEntry | Mark:
    """Return the last entry; the mark in front of all entries when there is none. Raises JournalDamaged."""
    numbers = log.numbers()
    if not numbers:
        return Mark(0, origin)
    found = _read_entry(log, numbers[-1])
    if found is None:
        raise StoreUnreachable(f"{log}: entry {numbers[-1]} was removed while it was read. Try again.")
    return found


def _entries_behind(log: NumberedFiles, start: Mark) -> Iterator[LogEntry]:
    """Yield the entries that count behind a mark, in order. Raises JournalDamaged where one is missing or changed."""
    yield from _counting(_existing(log, start.number + 1), log, start)


def _counting(entries: Iterable[LogEntry], log: NumberedFiles, start: Mark) -> Iterator[LogEntry]:
    """Yield those of all `entries` behind `start` that count: the others are passed over by the one that follows."""
    last, unsure = start, None
    for entry in entries:
        if unsure is not None and entry.after.number >= unsure.mark.number:
            yield unsure
            last = unsure.mark
        if entry.after != last:
            raise damaged(
                log, f"entry {entry.mark.number} does not follow on entry {last.number}, as the files have it"
            )
        unsure = entry
    if unsure is not None:
        yield unsure


def _existing(log: NumberedFiles, first: int) -> Iterator[LogEntry]:
    for number, there in enumerate((each for each in log.numbers() if each >= first), start=first):
        entry = _read_entry(log, number) if there == number else None
        if entry is None:
            raise damaged(log, f"entry {number} is missing")
        yield entry


def _pack_snapshot(mark: Mark, last: tuple[int, bytes], state: bytes, taken_in: TakenIn) -> bytes:
    """Return the state after an entry, whose `last` event is named, as a file."""
    packed = (zlib.compress(state, _LEVEL), zlib.compress(taken_in.encode(), _LEVEL))
    columns = (*last, mark.digest, *packed)
    return _encode(_Snapshot(*columns, link(b"", mark.number, *columns)))


def _read_snapshot(snapshots: NumberedFiles, number: int) -> SavedSnapshot | None:
    """Return a snapshot; None, with a warning, for one that is not what was written, or was removed."""
    content = snapshots.read(number)
    if content is None:
        return None
    try:
        found = _decode_snapshot(content)
        columns = (found.seq, found.chain, found.entry, found.state, found.taken_in)
        if found.digest != link(b"", number, *columns):
            raise ValueError("it is not what was written")
        taken_in = TakenIn.decode(zlib.decompress(found.taken_in))
        at = Mark(number, found.entry)
        saved = SavedSnapshot(found.seq, found.chain, zlib.decompress(found.state), taken_in, at)
    except (ValueError, zlib.error, msgspec.MsgspecError) as error:
        _log.warning("%s: the snapshot after entry %d is passed over: %s", snapshots, number, error)
        return None
    return saved


class VolumeReader:
    """A journal in a folder that is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = NumberedFiles(folder / ENTRIES)
        self._saved = NumberedFiles(folder / SNAPSHOTS)

    def __str__(self) -> str:
        return str(self._folder)

    def founding(self) -> bytes:
        """Return what the job was founded with; see `JournalReader`."""
        content = read_whole(self._folder / FOUNDING)
        if content is None:
            raise JournalError(
                f"{self._folder}: there is no such job. `midstep submit` makes it; check the folder, and that all "
                "machines see the same volume."
            )
        return content

    def snapshots(self, *, newest_first: bool = True) -> Iterator[SavedSnapshot]:
        """Yield the snapshots that are what was written; see `JournalReader`.

        In the order of time only those behind which every entry is kept.
        """
        numbers = self._saved.numbers()
        kept = [] if newest_first else self._log.numbers()
        for number in reversed(numbers) if newest_first else numbers:
            if not newest_first and not _is_whole(kept, number):
                continue
            found = _read_snapshot(self._saved, number)
            if found is not None and self._has(found.at):
                yield found

    def first_kept(self) -> int:
        """Return the number of the first event that is kept; see `JournalReader`."""
        numbers = self._log.numbers()
        earliest = _read_entry(self._log, numbers[0]) if numbers and numbers[0] > 1 else None
        return 1 if earliest is None else earliest.last[0] - len(earliest.body.rows) + 1

    def batches(self, start: ReplayStart) -> Iterator[Sequence[EventRow]]:
        """Yield the events behind a start; see `JournalReader`."""
        last = (start.seq, start.chain)
        for entry in _entries_behind(self._log, start.at or Mark(0, start.chain)):
            term = entry.body.term
            if not entry.body.rows and (term.events, term.last) != last:
                raise damaged(self._folder, f"term {term.term} did not begin after event {last[0]}")
            yield entry.body.rows
            last = entry.last

    def _has(self, mark: Mark) -> bool:
        entry = _read_entry(self._log, mark.number)
        if entry is None or entry.mark != mark:
            _log.warning("%s: the snapshot after entry %d has no such entry", self._folder, mark.number)
            return False
        return True


class VolumeStore(VolumeReader):
    """A journal in a folder, open for its one writer; see `JournalStore`."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        super().__init__(folder)
        self.limits = limits
        self._last: End = (0, b"")
        self._mark = Mark(0, b"")
        self._next = 1
        self._kept: int | None = None  # the entry of the newest snapshot
        self._removable = 0  # entries up to, and without, this one
        self._look_s = 0.0
        self._written_bytes = 0

    def take_over(self, leadership: Leadership, begin: Callable[[], TermRecord]) -> None:
        """Make the entry of a term; see `JournalStore`."""
        self._record = begin()
        content, mark = _pack(self._next, self._mark, Body(self._record, []))
        made = self._log.make(self._next, content)
        # What was listed before may have been old. What is listed after one's own change is not.
        if not made or not self._follows_what_is_kept() or not self._is_last(mark):
            raise ElectionLost(f"{self._folder}: another controller was quicker to begin a term.")
        self._advance(mark, self._last)
        leadership.begin(self._record.term)
        self._log.remove_drafts()

    def last_term(self, first: bytes) -> TermRecord | None:
        """Return how the last term began; see `JournalStore`."""
        end = _newest(self._log, first)
        if isinstance(end, Mark):
            self._advance(end, (0, first))
            return None
        self._advance(end.mark, end.last)
        return end.body.term

    def end(self, first: bytes) -> End:
        """Return number and hash of the last event, from the entry that has the last term; see `JournalStore`."""
        return self._last

    def append(self, rows: Sequence[EventRow]) -> None:
        """Make events durable; see `JournalStore`."""
        for _ in range(TRIES):
            content, mark = _pack(self._next, self._mark, Body(self._record, list(rows)))
            if self._log.make(self._next, content):
                break
            self._require_own(self._next)
            self._next += 1  # an earlier request that seemed to have failed: the next entry passes it over
        else:
            raise JournalError(f"{self._log}: entry {self._next} is made again and again. End what writes there.")
        if not self._follows_what_is_kept():
            self._require_others()
        self._advance(mark, (rows[-1].seq, rows[-1].chain))
        self._written_bytes = len(content)

    def weight_of(self, rows: Sequence[EventRow]) -> tuple[int, int]:
        """Return what events cost a takeover: a file to open, and its bytes where this controller has written it."""
        return 1, self._written_bytes

    def _advance(self, mark: Mark, last: End) -> None:
        self._mark, self._last, self._next = mark, last, mark.number + 1

    def _require_own(self, number: int) -> None:
        """Raise JournalSuperseded when an entry is not of this term, JournalDamaged when it is of none."""
        entry = _read_entry(self._log, number)
        if entry is None:
            raise StoreUnreachable(f"{self._log}: entry {number} is there, and cannot be found. Try again.")
        if entry.body.term.session == self._record.session:
            return
        if entry.body.term.term <= self._record.term:
            raise damaged(self._folder, f"after event {self._last[0]} it was changed by another program")
        self._superseded(entry.body.term.term)

    def _follows_what_is_kept(self) -> bool:
        """Say whether the entry just made counts: a number is free again when what was there is not kept any more.

        One that slept through that has made what no reader looks at, in front of all that is kept. It stays until the
        next removal.
        """
        if not self._mark.number:
            return True
        before = _read_entry(self._log, self._mark.number)
        return before is not None and before.mark == self._mark

    def _is_last(self, made: Mark) -> bool:
        """Say whether an entry just made is behind all others, but for those that have followed on it since."""
        if not any(number > made.number for number in self._log.numbers()):
            return True
        following = _read_entry(self._log, made.number + 1)
        return following is not None and following.after == made

    def _require_others(self) -> None:
        """Raise JournalSuperseded when the journal continues elsewhere, JournalDamaged when it does not."""
        if any(number > self._next for number in self._log.numbers()):
            self._superseded(self._record.term + 1)
        raise damaged(self._folder, f"entry {self._mark.number} was deleted while this controller was writing")

    def _superseded(self, term: int) -> NoReturn:
        raise JournalSuperseded(
            f"{self._folder}: term {term} has begun, another controller leads the job by now. This one, of term "
            f"{self._record.term}, is not in service any more, and must leave."
        )

    def _require_no_later(self) -> None:
        """Raise JournalSuperseded when there is an entry of another one behind the last one of this term."""
        if self._log.has(self._next):
            self._require_own(self._next)

    def snapshots(self, *, newest_first: bool = True) -> Iterator[SavedSnapshot]:
        """Yield the snapshots that are what was written; the last one that is asked for is the one that is used."""
        for saved in super().snapshots(newest_first=newest_first):
            self._kept = saved.at.number
            yield saved

    def write_snapshot(self, last: End, state: bytes, taken_in: TakenIn) -> None:
        """Keep the state after the last event; see `JournalStore`."""
        self._require_no_later()
        mark = self._mark
        self._saved.remove(mark.number)  # one of that number could not be read, or is the same
        self._saved.make(mark.number, _pack_snapshot(mark, last, state, taken_in))
        if self._kept is not None:
            self._removable = self._kept
        self._kept = mark.number

    def tidy(self) -> None:
        """Remove some entries, the earliest first, so that what is left is without a gap; see `JournalStore`."""
        if not self._removable:
            return
        self._require_no_later()
        for files in (self._saved, self._log):
            earliest = [each for each in files.numbers() if each < self._removable][:REMOVED_AT_ONCE]
            for number in earliest:
                files.remove(number)
        if not earliest:
            self._removable = 0

    def conclude(self, last: End, state: Callable[[], bytes], taken_in: TakenIn) -> None:
        """The files stay as they are, in the job's directory."""

    def require_newest(self) -> None:
        """Look now and then for a later term; see `JournalStore`."""
        now = time.monotonic()
        if now < self._look_s:
            return
        self._look_s = now + LOOK_S
        try:
            self._require_no_later()
        except StoreUnreachable as error:
            _log.warning("whether this controller still leads is not known: %s", error)

    def close(self) -> None:
        """Nothing is open."""


def submit(folder: Path, job: JobSpec, policy: Policy, platform: str = "") -> bool:
    """Found the journal of a new job; `platform`: see Founding. Return False when there is one in that folder.

    Raises JournalError, also when the file system is none on which controllers can know who was first.
    """
    for name in (ENTRIES, SNAPSHOTS):
        NumberedFiles(folder / name).make_folder()
    return link_whole(folder / FOUNDING, new_founding(job, policy, platform=platform))


def open_on_volume(
    folder: Path,
    election: Election,
    *,
    name: str = "",
    heard: Callable[[], HeardClock | None] = lambda: None,
    wait_s: float | None = 0.0,
    beat: Callable[[], None] = lambda: None,
    limits: Limits = LIMITS,
) -> Journal:
    """Become the active controller of the job; see `open_journal`."""
    VolumeReader(folder).founding()
    return open_journal(
        lambda leadership: VolumeStore(folder, limits), election, name=name, heard=heard, wait_s=wait_s, beat=beat
    )


def _is_whole(numbers: Sequence[int], first: int) -> bool:
    """Say whether there is every entry from a number on."""
    return first in numbers and numbers[-1] - first == sum(each > first for each in numbers)
