"""What a journal on several machines holds: terms, events and snapshots, tied together as in that of one host."""

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ...protocol.errors import JournalError
from ..clock import ClockReading
from ..recovery.events import Event
from .chain import damaged, link
from .records import Founding
from .senders import TakenIn
from .snapshots import SavedSnapshot
from .store import JournalEntry

_Record = TypeVar("_Record")
_LEVEL = 1  # of compression: the controller waits for it
_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(Event).decode


class TermRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a term began, after how many `events`, the last with the hash `last`. `chain` ties it to the term before."""

    term: int
    session: int
    controller: str
    host: str
    clock: ClockReading
    events: int
    last: bytes
    chain: bytes

    def chain_after(self, before: bytes) -> bytes:
        """Return the hash that this term has to have behind another one."""
        clock = msgspec.structs.astuple(self.clock)
        return link(before, self.term, self.session, self.controller, self.host, *clock, self.events, self.last)


class EventRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An event as it is kept, with its number in the job and the hash that ties it to the one before."""

    seq: int
    term: int
    at_s: float
    sender: str
    session: int
    number: int | None
    kind: str
    payload: bytes
    chain: bytes

    def chain_after(self, before: bytes) -> bytes:
        """Return the hash that this event has to have behind another one."""
        return link(
            before, self.seq, self.term, self.at_s, self.sender, self.session, self.number, self.kind, self.payload
        )


class _Snapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    chain: bytes
    state: bytes
    taken_in: bytes
    digest: bytes


_decode_term = msgspec.msgpack.Decoder(TermRecord).decode
_decode_rows = msgspec.msgpack.Decoder(list[EventRow]).decode
_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode


def read_founding(place: object, content: bytes) -> Founding:
    """Return what a job was founded with. Raises JournalError."""
    try:
        return msgspec.msgpack.decode(content, type=Founding)
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"{place}: the job cannot be read: {error}. Use the midstep version that submitted it."
        ) from error


def read_terms(place: object, contents: list[bytes], first: bytes) -> TermRecord | None:
    """Return the last of all terms. Raises JournalDamaged when one is missing, or out of its order."""
    last: TermRecord | None = None
    for content in contents:
        record = _checked(place, _decode_term, content, "a term")
        number = 1 if last is None else last.term + 1
        if record.term != number or record.chain != record.chain_after(first if last is None else last.chain):
            raise damaged(place, f"term {number} is missing, or is not what was written")
        last = record
    return last


def chained(
    entries: Sequence[JournalEntry], at_s: float, term: int, last: tuple[int, bytes], taken_in: TakenIn
) -> tuple[list[EventRow], tuple[bool, ...], tuple[int, bytes]]:
    """Return what is to be written behind the `last` event, which entries are new, and the last event then.

    An entry that was taken in before, or that comes twice, is not written again.
    """
    seq, chain = last
    rows: list[EventRow] = []
    fresh: list[bool] = []
    seen: set[tuple[str, int, int]] = set()
    for entry in entries:
        identity = (entry.sender, entry.session, entry.number)
        known = bool(entry.number) and (identity in seen or taken_in.has(*identity))
        fresh.append(not known)
        if known:
            continue
        seen.add(identity)
        seq += 1
        kind, payload = type(entry.event).__name__, _encode(entry.event)
        row = EventRow(seq, term, at_s, entry.sender, entry.session, entry.number or None, kind, payload, b"")
        chain = row.chain_after(chain)
        rows.append(msgspec.structs.replace(row, chain=chain))
    return rows, tuple(fresh), (seq, chain)


def pack_rows(rows: list[EventRow]) -> bytes:
    """Return events as one value."""
    return zlib.compress(_encode(rows), _LEVEL)


def unpack_rows(place: object, content: bytes) -> list[EventRow]:
    """Return the events of one value. Raises JournalDamaged."""
    return _checked(place, lambda data: _decode_rows(zlib.decompress(data)), content, "a batch of events")


def event_of(place: object, row: EventRow) -> Event:
    """Return the event of a row. Raises JournalError for one that this version does not know."""
    try:
        event: Event = _decode_event(row.payload)
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"{place}: event {row.seq} ({row.kind}) cannot be read: {error}. Use the midstep version that wrote it."
        ) from error
    return event


def pack_snapshot(last: tuple[int, bytes], state: bytes, taken_in: TakenIn) -> bytes:
    """Return the state after the `last` event as one value."""
    columns = (last[1], zlib.compress(state, _LEVEL), zlib.compress(taken_in.encode(), _LEVEL))
    return _encode(_Snapshot(*columns, link(b"", last[0], *columns)))


def unpack_snapshot(seq: int, content: bytes) -> SavedSnapshot:
    """Return a snapshot. Raises ValueError when it is not what was written."""
    try:
        saved = _decode_snapshot(content)
        if saved.digest != link(b"", seq, saved.chain, saved.state, saved.taken_in):
            raise ValueError("it is not what was written")
        taken_in = TakenIn.decode(zlib.decompress(saved.taken_in))
        return SavedSnapshot(seq, saved.chain, zlib.decompress(saved.state), taken_in)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error


def _checked(place: object, decode: Callable[[bytes], _Record], content: bytes, what: str) -> _Record:
    try:
        return decode(content)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise damaged(place, f"{what} is not what was written ({error})") from error
