"""The entries of a journal on a volume: what each holds, how it is tied to the one before, and which of them count.

An entry that its controller could not be sure of, since the file system failed while it was made, is passed over: the
next entry says after which one it follows.
"""

import logging
import zlib
from collections.abc import Iterable, Iterator

import msgspec

from ...protocol.errors import StoreUnreachable
from ..journal.chain import damaged, link
from ..journal.event_rows import EventRow, TermRecord
from ..journal.senders import TakenIn
from ..journal.snapshots import SavedSnapshot
from .files import NumberedFiles

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


class VolumeSnapshot(msgspec.Struct, frozen=True):
    """A state, after the entry of `mark`."""

    mark: Mark
    saved: SavedSnapshot


_encode = msgspec.msgpack.Encoder().encode
_decode_written = msgspec.msgpack.Decoder(_Written).decode
_decode_body = msgspec.msgpack.Decoder(Body).decode
_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode


def pack(number: int, after: Mark, body: Body) -> tuple[bytes, Mark]:
    """Return an entry as a file, and its mark."""
    packed = zlib.compress(_encode(body), _LEVEL)
    digest = link(after.digest, number, after.number, packed)
    return _encode(_Written(after.number, after.digest, packed, digest)), Mark(number, digest)


def read_entry(log: NumberedFiles, number: int) -> LogEntry | None:
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


def newest(log: NumberedFiles, origin: bytes) -> LogEntry | Mark:
    """Return the last entry; the mark in front of all entries when there is none. Raises JournalDamaged."""
    numbers = log.numbers()
    if not numbers:
        return Mark(0, origin)
    found = read_entry(log, numbers[-1])
    if found is None:
        raise StoreUnreachable(f"{log}: entry {numbers[-1]} was removed while it was read. Try again.")
    return found


def entries_behind(log: NumberedFiles, start: Mark) -> Iterator[LogEntry]:
    """Yield the entries that count behind a mark, in order. Raises JournalDamaged where one is missing or changed."""
    yield from counting(_existing(log, start.number + 1), log, start)


def counting(entries: Iterable[LogEntry], log: NumberedFiles, start: Mark) -> Iterator[LogEntry]:
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
        entry = read_entry(log, number) if there == number else None
        if entry is None:
            raise damaged(log, f"entry {number} is missing")
        yield entry


def pack_snapshot(mark: Mark, last: tuple[int, bytes], state: bytes, taken_in: TakenIn) -> bytes:
    """Return the state after an entry, whose `last` event is named, as a file."""
    packed = (zlib.compress(state, _LEVEL), zlib.compress(taken_in.encode(), _LEVEL))
    columns = (*last, mark.digest, *packed)
    return _encode(_Snapshot(*columns, link(b"", mark.number, *columns)))


def read_snapshot(snapshots: NumberedFiles, number: int) -> VolumeSnapshot | None:
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
        saved = SavedSnapshot(found.seq, found.chain, zlib.decompress(found.state), taken_in)
    except (ValueError, zlib.error, msgspec.MsgspecError) as error:
        _log.warning("%s: the snapshot after entry %d is passed over: %s", snapshots, number, error)
        return None
    return VolumeSnapshot(Mark(number, found.entry), saved)
