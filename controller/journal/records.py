"""Reading a journal: every record is checked against the chain before anything is made of it."""

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from ...policies.schema import Policy
from ...protocol.errors import JournalError, SnapshotUnreadable
from ...protocol.types import JobSpec
from ..clock import ClockReading
from ..recovery.events import Event
from ..recovery.machine import RecoveryMachine
from . import archive, snapshots, sqlite_file
from .archive import EventRow
from .chain import damaged, link, origin
from .head import Head
from .senders import TakenIn

FOUNDING = "founding"
ORIGIN = "origin"
_REPLAY_CHUNK = 500
_log = logging.getLogger(__name__)
_decode_event = msgspec.msgpack.Decoder(Event).decode


class Founding(msgspec.Struct, frozen=True):
    """What a job's machine starts from, and what never changes afterwards. `created_s`: wall-clock seconds.

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
            self.policy, self.job, can_create_nodes=self.can_create_nodes, rendezvous_key=self.rendezvous_key
        )


class Leases(msgspec.Struct, frozen=True):
    """What the terms so far come to: the last one's number, session and clock, and the end of their chain."""

    term: int
    session: int
    chain: bytes
    clock: ClockReading | None


def read_founding(connection: sqlite3.Connection, path: Path) -> tuple[Founding, bytes]:
    """Return what the journal was founded with, and the origin of its chains. Raises JournalError."""
    with sqlite_file.explained(path, "read the job from the journal"):
        meta = dict(connection.execute("SELECT key, value FROM meta"))
    content = meta.get(FOUNDING)
    if not isinstance(content, bytes) or origin(content) != meta.get(ORIGIN):
        raise damaged(path, "the job that it was founded for is not what was written")
    try:
        return msgspec.msgpack.decode(content, type=Founding), origin(content)
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"{path}: the job in the journal cannot be read: {error}. Use the midstep version that wrote it."
        ) from error


def read_leases(connection: sqlite3.Connection, path: Path, first: bytes) -> Leases:
    """Return what the terms so far come to. Raises JournalDamaged when one is missing or was changed."""
    leases = Leases(0, 0, first, None)
    with sqlite_file.explained(path, "read the terms"):
        rows = connection.execute(
            "SELECT term, session, pid, host, boot, monotonic_s, began_s, events, chain FROM lease ORDER BY term"
        ).fetchall()
        for *columns, chain in rows:
            known = link(leases.chain, *columns, chain_at(connection, columns[-1], first))
            if columns[0] != leases.term + 1 or chain != known:
                raise damaged(path, f"term {leases.term + 1} is missing, or is not what was written")
            term, session, _, _, boot, monotonic_s, began_s, _ = columns
            leases = Leases(term, session, known, ClockReading(boot, monotonic_s, began_s))
    return leases


def chain_at(connection: sqlite3.Connection, seq: int, first: bytes) -> bytes | None:
    """Return the hash of event `seq` as the file has it, 0 being the origin; None when there is no such event.

    Of archived events only those have a hash at hand that a term begins with.
    """
    if seq == 0:
        return first
    row = connection.execute("SELECT chain FROM events WHERE seq = ?", (seq,)).fetchone()
    if row is None and sqlite_file.is_compacted(connection):
        row = connection.execute("SELECT chain FROM anchors WHERE seq = ?", (seq,)).fetchone()
    return row[0] if row is not None else None


def last_event(connection: sqlite3.Connection, first: bytes) -> tuple[int, bytes]:
    """Return number and hash of the last event as the file has them; 0 and the origin when there is none."""
    row = connection.execute("SELECT seq, chain FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    return (row[0], row[1]) if row is not None else (0, first)


def require_head(connection: sqlite3.Connection, path: Path, head: Head, first: bytes) -> None:
    """Raise JournalDamaged unless the journal has all that `head` says it had."""
    if head.origin != first:
        raise damaged(path, "this is the journal of another job, or of an earlier run of this one")
    with sqlite_file.explained(path, "compare the journal with its last end"):
        row = connection.execute("SELECT chain FROM lease WHERE term = ?", (head.term,)).fetchone()
        lease = first if head.term == 0 else row and row[0]
        events, _ = last_event(connection, first)
        chain = chain_at(connection, head.events, first)
        if chain is None and head.events < archive.oldest_event(connection):
            chain = head.chain  # the note could not be written for long; the journal has come much further
    if lease != head.lease:
        raise damaged(path, f"term {head.term} was in it, and is not any more")
    if chain is None:
        raise damaged(path, f"its end is lost: {head.events} events were in it, and {events} are")
    if chain != head.chain:
        raise damaged(path, f"event {head.events} is not the one that was written")


class ReplayStart(msgspec.Struct, frozen=True):
    """Where a replay begins: behind event `seq`, whose hash is `chain`; 0 and the origin for all of them."""

    seq: int
    chain: bytes
    taken_in: TakenIn


def begin(connection: sqlite3.Connection, path: Path, first: bytes, restore: Callable[[bytes], object]) -> ReplayStart:
    """Have the newest snapshot restored that can be read, and return where the events continue.

    `restore` raises SnapshotUnreadable for one that this version cannot read; then the one before is tried. Where there
    is none, the events begin with the founding. Raises JournalError when neither will do.
    """
    return _start(connection, path, first, restore, snapshots.read(connection, path))


def begin_early(
    connection: sqlite3.Connection, path: Path, first: bytes, restore: Callable[[bytes], object]
) -> ReplayStart:
    """As `begin`, in front of the earliest event that is kept."""
    whole = _first_kept(connection, path) == 1
    saved = snapshots.read(connection, path, newest_first=False)
    return _start(connection, path, first, restore, () if whole else saved)


def _start(
    connection: sqlite3.Connection,
    path: Path,
    first: bytes,
    restore: Callable[[bytes], object],
    snapshots: Iterable[snapshots.SavedSnapshot],
) -> ReplayStart:
    failure = None
    for saved in snapshots:
        try:
            restore(saved.state)
        except SnapshotUnreadable as error:
            failure = error
            _log.warning("%s: the snapshot after event %d is passed over: %s", path, saved.seq, error)
            continue
        return ReplayStart(saved.seq, saved.chain, saved.taken_in)
    kept = _first_kept(connection, path)
    if kept > 1:
        raise JournalError(
            f"{path}: the events before number {kept} are not kept any more, and no snapshot of what they led to can "
            f"be read ({failure or 'there is none that is what was written'}). Use the midstep version that wrote it."
        )
    return ReplayStart(0, first, TakenIn())


def _first_kept(connection: sqlite3.Connection, path: Path) -> int:
    with sqlite_file.explained(path, "look for the first event"):
        return (archive.first_kept(connection) if sqlite_file.is_compacted(connection) else None) or 1


def read_events(
    connection: sqlite3.Connection, path: Path, start: ReplayStart, beat: Callable[[], None] = lambda: None
) -> Iterator[tuple[Event, float]]:
    """Yield the events behind `start` with their times, in order, from an open journal; what was taken in is noted.

    Raises JournalDamaged at the first one that is missing or was changed, JournalError for one that this version does
    not know.
    """
    last, chain = start.seq, start.chain
    while rows := _rows_after(connection, path, last):
        for *columns, written in rows:
            seq, _, at_s, sender, session, number, kind, payload = columns
            if seq <= last:
                continue
            if seq != last + 1:
                raise damaged(path, f"event {last + 1} is missing")
            chain = link(chain, *columns)
            if chain != written:
                raise damaged(path, f"event {seq} ({kind}), or what was before it, is not what was written")
            try:
                event = _decode_event(payload)
            except msgspec.MsgspecError as error:
                raise JournalError(
                    f"{path}: event {seq} ({kind}) cannot be read: {error}. Use the midstep version that wrote it."
                ) from error
            start.taken_in.take(sender, session, number)
            yield event, at_s
            last = seq
        beat()


def _rows_after(connection: sqlite3.Connection, path: Path, last: int) -> Sequence[EventRow]:
    """Return rows behind event `last`: a running controller may archive some while they are read."""
    with sqlite_file.explained(path, "read events"):
        rows = connection.execute(
            "SELECT seq, term, at_s, sender, session, number, kind, payload, chain FROM events"
            " WHERE seq > ? ORDER BY seq LIMIT ?",
            (last, _REPLAY_CHUNK),
        ).fetchall()
        if rows and rows[0][0] != last + 1 and sqlite_file.is_compacted(connection):
            return archive.unpack(connection, path, last + 1) or rows
        return rows
