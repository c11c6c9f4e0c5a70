"""The records of a journal, whatever it is kept in, and the chain that ties them together.

A journal has a founding, terms, events and snapshots. Each record carries a hash of its own columns and of the hash of
the record before; the first one follows from the job that the journal was founded for. So a record that is missing,
changed or foreign shows. This detects accidents: a write that never came, a file that was cut, copied over or restored.
It does not stop a program that owns the files and computes the hashes again.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from xxhash import xxh3_128_digest

from ...devices.kinds import has_device_links
from ...policies.schema import Policy
from ...protocol.errors import JournalDamaged, JournalError
from ...protocol.mailbox import SenderMemory
from ...protocol.types import CONTROLLER, JobSpec
from ..clock import ClockReading
from ..journaled import Journaled
from ..recovery.machine import RecoveryMachine

Column = int | float | str | bytes | None
End = tuple[int, bytes]
"""Number and hash of the last event."""

ADVICE = (
    "It may tell of an older world, so no controller acts on it. The ranks that train continue, without recovery. Let "
    "them finish or end the job, and start it in another job directory; keep this one to look at."
)
_LEVEL = 1  # of compression: the controller waits for it

_Record = TypeVar("_Record")
_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(Journaled).decode


def origin(founding: bytes) -> bytes:
    """Return the hash that the chains of a journal begin with."""
    return xxh3_128_digest(founding)


def link(before: bytes, *columns: Column) -> bytes:
    """Return the hash of a record: of its columns as the file has them, and of the hash `before` it."""
    return xxh3_128_digest(_encode((before, columns)))


def damaged(path: object, what: str) -> JournalDamaged:
    """Return the error for a journal that is not what was written."""
    return JournalDamaged(f"{path}: {what}. {ADVICE}")


class Founding(msgspec.Struct, frozen=True):
    """The start of a job's machine, which never changes afterwards. `created_s`: wall-clock seconds.

    `platform`: what makes the job's nodes, a process that connects with the job's token; empty: its launcher does, or
    they join by themselves. `rendezvous_key`: random, another one in every job, and so what tells a job from another
    one of the same name. Every generation has its secret from it.
    """

    job: JobSpec
    policy: Policy
    can_create_nodes: bool
    created_s: float
    rendezvous_key: bytes
    platform: str = ""

    def machine(self) -> RecoveryMachine:
        """Return a machine to which nothing has happened yet."""
        return RecoveryMachine(
            self.policy,
            self.job,
            can_create_nodes=self.can_create_nodes,
            rendezvous_key=self.rendezvous_key,
            device_links=has_device_links(self.policy.communicator.name),
        )


class JournalEntry(msgspec.Struct, frozen=True):
    """An event and where it came from. `number` 0: not numbered, so it cannot be distinguished from a repetition."""

    event: Journaled
    sender: str
    session: int
    number: int

    @property
    def identity(self) -> tuple[str, int, int]:
        """Return what a repetition of the entry has in common with it."""
        return self.sender, self.session, self.number


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


class _Sender(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`taken`: bit i stands for the number `highest - i`."""

    name: str
    session: int
    highest: int
    taken: bytes


_decode_senders = msgspec.msgpack.Decoder(list[_Sender]).decode


class TakenIn:
    """The messages taken in from each sender, so that no later controller takes one in twice.

    For each sender the numbers of its latest session, small enough to be part of every snapshot. The controller's own
    events are no message.
    """

    def __init__(self) -> None:
        self._senders: dict[str, SenderMemory] = {}

    def take(self, sender: str, session: int, number: int | None) -> None:
        """Note an event that is in the journal."""
        if number is None or sender == CONTROLLER:
            return
        known = self._senders.get(sender)
        if known is None or known.session < session:
            known = self._senders[sender] = SenderMemory(session)
        if known.session == session:
            known.mark_taken(number)

    def has(self, sender: str, session: int, number: int) -> bool:
        """Say whether an event of the sender's latest session was noted."""
        known = self._senders.get(sender)
        return known is not None and known.session == session and known.was_taken(number)

    def senders(self) -> Iterator[tuple[str, SenderMemory]]:
        """Yield a memory for each sender, for the receiver's mailbox to keep."""
        for name, known in self._senders.items():
            yield name, SenderMemory.of(known.session, known.highest, known.taken)

    def encode(self) -> bytes:
        """Write it down."""
        return _encode(
            [
                _Sender(
                    name, known.session, known.highest, known.taken.to_bytes((known.taken.bit_length() + 7) // 8, "big")
                )
                for name, known in self._senders.items()
            ]
        )

    @classmethod
    def decode(cls, data: bytes) -> "TakenIn":
        """Return what was written down. Raises msgspec.MsgspecError."""
        made = cls()
        for each in _decode_senders(data):
            taken = int.from_bytes(each.taken, "big")
            made._senders[each.name] = SenderMemory.of(each.session, each.highest, taken)
        return made


class SavedSnapshot(msgspec.Struct, frozen=True):
    """The state after event `seq`, whose hash is `chain`. `at`: where the store finds the events after it."""

    seq: int
    chain: bytes
    state: bytes
    taken_in: TakenIn
    at: Any = None


class ReplayStart(msgspec.Struct, frozen=True):
    """Where a replay begins: behind event `seq`, whose hash is `chain`; 0 and the origin for all events.

    `at`: the same as the store has it.
    """

    seq: int
    chain: bytes
    taken_in: TakenIn
    at: Any = None


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
            f"{place}: the job in the journal cannot be read: {error}. Use the midstep version that wrote it."
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
    entries: Sequence[JournalEntry], at_s: float, term: int, last: End, is_known: Callable[[JournalEntry], bool]
) -> tuple[list[EventRow], tuple[bool, ...]]:
    """Return what is to be written behind the `last` event, and which entries are new.

    An entry that `is_known`, or that comes twice, is not written again.
    """
    seq, chain = last
    rows: list[EventRow] = []
    fresh: list[bool] = []
    seen: set[tuple[str, int, int]] = set()
    for entry in entries:
        known = bool(entry.number) and (entry.identity in seen or is_known(entry))
        fresh.append(not known)
        if known:
            continue
        seen.add(entry.identity)
        seq += 1
        kind, payload = type(entry.event).__name__, _encode(entry.event)
        columns = (seq, term, at_s, entry.sender, entry.session, entry.number or None, kind, payload)
        chain = link(chain, *columns)
        rows.append(EventRow(*columns, chain))
    return rows, tuple(fresh)


def pack_rows(rows: list[EventRow]) -> bytes:
    """Return events as one value."""
    return zlib.compress(_encode(rows), _LEVEL)


def unpack_rows(place: object, content: bytes) -> list[EventRow]:
    """Return the events of one value. Raises JournalDamaged."""
    return _checked(place, lambda data: _decode_rows(zlib.decompress(data)), content, "a batch of events")


def event_of(place: object, row: EventRow) -> Journaled:
    """Return the event of a row. Raises JournalError for one that this version does not know."""
    try:
        event: Journaled = _decode_event(row.payload)
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"{place}: event {row.seq} ({row.kind}) cannot be read: {error}. Use the midstep version that wrote it."
        ) from error
    return event


def pack_snapshot(last: End, state: bytes, taken_in: TakenIn) -> bytes:
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
