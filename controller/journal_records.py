"""Reading a journal: every record is checked against the chain before anything is made of it."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..policies.schema import Policy
from ..protocol.errors import JournalError
from ..protocol.types import JobSpec
from . import journal_file
from .clock import ClockReading
from .events import Event
from .journal_chain import damaged, link, origin
from .journal_head import Head
from .machine import RecoveryMachine

FOUNDING = "founding"
ORIGIN = "origin"
_REPLAY_CHUNK = 500
_decode_event = msgspec.msgpack.Decoder(Event).decode


class Founding(msgspec.Struct, frozen=True):
    """What a job's machine starts from, and what never changes afterwards. `created_s`: wall-clock seconds.

    `rendezvous_key`: random, another one in every job, and so what tells a job from another one of the same name. Every
    generation has its secret from it.
    """

    job: JobSpec
    policy: Policy
    can_create_nodes: bool
    created_s: float
    rendezvous_key: bytes

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
    with journal_file.explained(path, "read the job from the journal"):
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
    with journal_file.explained(path, "read the terms"):
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
    """Return the hash of event `seq` as the file has it, 0 being the origin; None when there is no such event."""
    if seq == 0:
        return first
    row = connection.execute("SELECT chain FROM events WHERE seq = ?", (seq,)).fetchone()
    return row[0] if row is not None else None


def last_event(connection: sqlite3.Connection, first: bytes) -> tuple[int, bytes]:
    """Return number and hash of the last event as the file has them; 0 and the origin when there is none."""
    row = connection.execute("SELECT seq, chain FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    return (row[0], row[1]) if row is not None else (0, first)


def require_head(connection: sqlite3.Connection, path: Path, head: Head, first: bytes) -> None:
    """Raise JournalDamaged unless the journal has all that `head` says it had."""
    if head.origin != first:
        raise damaged(path, "this is the journal of another job, or of an earlier run of this one")
    with journal_file.explained(path, "compare the journal with its last end"):
        row = connection.execute("SELECT chain FROM lease WHERE term = ?", (head.term,)).fetchone()
        lease = first if head.term == 0 else row and row[0]
        events, _ = last_event(connection, first)
        chain = chain_at(connection, head.events, first)
    if lease != head.lease:
        raise damaged(path, f"term {head.term} was in it, and is not any more")
    if chain is None:
        raise damaged(path, f"its end is lost: {head.events} events were in it, and {events} are")
    if chain != head.chain:
        raise damaged(path, f"event {head.events} is not the one that was written")


def read_events(connection: sqlite3.Connection, path: Path, first: bytes) -> Iterator[tuple[Event, float]]:
    """Yield every event with its time, in order, from an open journal.

    Raises JournalDamaged at the first one that is missing or was changed, JournalError for one that this version does
    not know.
    """
    last, chain = 0, first
    while True:
        with journal_file.explained(path, "read events"):
            rows = connection.execute(
                "SELECT seq, term, at_s, sender, session, number, kind, payload, chain FROM events"
                " WHERE seq > ? ORDER BY seq LIMIT ?",
                (last, _REPLAY_CHUNK),
            ).fetchall()
        if not rows:
            return
        for *columns, written in rows:
            seq, _, at_s, _, _, _, kind, payload = columns
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
            yield event, at_s
            last = seq
