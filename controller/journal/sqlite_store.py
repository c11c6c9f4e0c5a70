"""The journal of one host: the tables of a sqlite file, of which one controller at a time writes.

Events that no takeover has to read any more are packed into blocks, so that stories of old incidents can be told, and
bounded. Each step is one transaction and short, so that a controller can do it between two turns and may die at any
point of it. A snapshot is tied to the chain of the events by the hash of the event that it follows on. Several are
kept: one that cannot be read is passed over for an earlier one, and the events after that one are kept as well.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...policies.schema import Policy
from ...protocol.errors import JournalError, JournalSuperseded
from ...protocol.types import JobSpec
from ..clock import ClockReading
from ..election.election import Election, Leadership
from ..election.file_election import FileElection
from . import sqlite_file
from .journal import AlreadyWrittenError, Journal, Limits, new_founding, open_journal
from .records import End, EventRow, ReplayStart, SavedSnapshot, TakenIn, TermRecord, damaged, link, origin
from .sqlite_file import Head, HeadFile, lock_path

BLOCK = 1000  # events packed in one go: some milliseconds
FOUNDING = "founding"
ORIGIN = "origin"
_COLUMNS = "seq, term, at_s, sender, session, number, kind, payload, chain"
_INSERT = (
    f"INSERT INTO events ({_COLUMNS})"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (sender, session, number) DO NOTHING"
)
_KNOWN = "SELECT 1 FROM events WHERE sender = ? AND session = ? AND number = ?"
_REPLAY_CHUNK = 500
_LEVEL = 1  # of compression: the controller waits for it

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, int, float, str, int, int | None, str, bytes, bytes]]).decode

Row = tuple[Any, ...]  # of the events' table, checked by its hash before anything is made of it


class SqliteReader:
    """A journal that is read, also beside a controller that writes it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """`connection` is closed with it."""
        self._path = path
        self._connection = connection

    def __str__(self) -> str:
        return str(self._path)

    def founding(self) -> bytes:
        """Return what the job was founded with; see `JournalReader`."""
        with sqlite_file.explained(self._path, "read the job from the journal"):
            meta = dict(self._connection.execute("SELECT key, value FROM meta"))
        content = meta.get(FOUNDING)
        if not isinstance(content, bytes) or origin(content) != meta.get(ORIGIN):
            raise damaged(self._path, "the job that it was founded for is not what was written")
        return content

    def snapshots(self, *, newest_first: bool = True) -> Iterator[SavedSnapshot]:
        """Yield the snapshots that are what was written; see `JournalReader`."""
        with sqlite_file.explained(self._path, "look for snapshots"):
            known = self._snapshots()
        for seq in reversed(known) if newest_first else known:
            with sqlite_file.explained(self._path, "read a snapshot"):
                row = self._connection.execute("SELECT * FROM snapshots WHERE seq = ?", (seq,)).fetchone()
            if row is None:  # it was removed by a running controller
                continue
            *columns, digest = row
            try:
                if digest != link(b"", *columns):
                    raise ValueError("it is not what was written")
                _, chain, state, taken_in = columns
                saved = SavedSnapshot(seq, chain, zlib.decompress(state), TakenIn.decode(zlib.decompress(taken_in)))
            except (ValueError, TypeError, zlib.error, msgspec.MsgspecError) as error:
                _log.warning("%s: the snapshot after event %d is passed over: %s", self._path, seq, error)
                continue
            yield saved

    def first_kept(self) -> int:
        """Return the number of the first event that is kept, archived or not; see `JournalReader`."""
        archived = None
        with sqlite_file.explained(self._path, "look for the first event"):
            if sqlite_file.is_compacted(self._connection):
                archived = self._connection.execute("SELECT min(first) FROM archive").fetchone()[0]
            return self._oldest() if archived is None else int(archived)

    def batches(self, start: ReplayStart) -> Iterator[Sequence[EventRow]]:
        """Yield the events behind a start; see `JournalReader`."""
        last = start.seq
        while rows := self._rows_after(last):
            found = [EventRow(*row) for row in rows if row[0] > last]
            yield found
            last = found[-1].seq

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._connection.close()

    def _rows_after(self, last: int) -> Sequence[Row]:
        """Return rows behind event `last`: a running controller may archive some while they are read."""
        with sqlite_file.explained(self._path, "read events"):
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (last, _REPLAY_CHUNK)
            ).fetchall()
            if rows and rows[0][0] != last + 1 and sqlite_file.is_compacted(self._connection):
                return self._archived(last + 1) or rows
            return rows

    def _archived(self, seq: int) -> list[Row]:
        """Return the rows of the archived block that has event `seq`; empty when none has."""
        row = self._connection.execute(
            "SELECT last, rows FROM archive WHERE first <= ? ORDER BY first DESC LIMIT 1", (seq,)
        ).fetchone()
        if row is None or row[0] < seq:
            return []
        try:
            return list(_decode(zlib.decompress(row[1])))
        except (zlib.error, msgspec.MsgspecError, TypeError) as error:
            raise damaged(self._path, f"the archived events around number {seq} are not what was written") from error

    def _snapshots(self) -> list[int]:
        """Return after which events there are snapshots, the earliest first."""
        if not sqlite_file.is_compacted(self._connection):
            return []
        return [seq for (seq,) in self._connection.execute("SELECT seq FROM snapshots ORDER BY seq")]

    def _oldest(self) -> int:
        """Return the number of the first event that is not archived; 1 when there is none."""
        seq = self._connection.execute("SELECT min(seq) FROM events").fetchone()[0]
        return 1 if seq is None else int(seq)

    def _last_event(self, first: bytes) -> End:
        row = self._connection.execute("SELECT seq, chain FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        return (row[0], row[1]) if row is not None else (0, first)

    def _chain_at(self, seq: int, first: bytes) -> bytes | None:
        """Return the hash of event `seq` as the file has it, 0 being the origin; None when there is no such event.

        Of archived events only those have a hash at hand that a term begins with.
        """
        if seq == 0:
            return first
        row = self._connection.execute("SELECT chain FROM events WHERE seq = ?", (seq,)).fetchone()
        if row is None and sqlite_file.is_compacted(self._connection):
            row = self._connection.execute("SELECT chain FROM anchors WHERE seq = ?", (seq,)).fetchone()
        return row[0] if row is not None else None


class SqliteStore(SqliteReader):
    """The journal of one host, open for its one writer; see `JournalStore`."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, *, head: Path | None, limits: Limits, in_memory: bool = False
    ) -> None:
        """`head`: where the journal's end is noted, and with which it is compared.

        `in_memory`: the connection is to a copy, so that neither the file of that name nor the note is looked after.
        """
        super().__init__(path, connection)
        self.limits = limits
        self._head = head
        self._in_memory = in_memory
        self._note_file: HeadFile | None = None
        self._files: sqlite_file.OpenFiles | None = None
        self._origin = self._lease = b""
        self._term = 0
        self._last: End = (0, b"")
        self._oldest_event, self._archive_to = 1, 0  # the first event that is not archived, and the last that is to be

    def take_over(self, leadership: Leadership, begin: Callable[[], TermRecord]) -> None:
        """Begin a term in one transaction; see `JournalStore`. A leader that was deposed and blocks it is ended."""
        if self._head is not None and not self._in_memory:
            with sqlite_file.explained(self._head, "open the note of the journal's end"):
                self._note_file = HeadFile(self._head)
        sqlite_file.wait_for_writers(self._connection, sqlite_file.BLOCKED_S)
        try:
            self._begin_term(leadership, begin)
        except JournalError as error:
            if not sqlite_file.is_busy(error):
                raise
            leadership.overthrow()
            sqlite_file.wait_for_writers(self._connection, sqlite_file.BUSY_S)
            self._begin_term(leadership, begin)
        sqlite_file.wait_for_writers(self._connection, sqlite_file.BUSY_S)
        self._note()
        if not self._in_memory:
            with sqlite_file.explained(self._path, "look at the journal"):
                self._files = sqlite_file.OpenFiles(self._path)

    def _begin_term(self, leadership: Leadership, begin: Callable[[], TermRecord]) -> None:
        with sqlite_file.explained(self._path, "begin a term"), sqlite_file.transaction(self._connection):
            # A leader that was deposed may wake up at any moment: what it has written, it has written before this.
            record = begin()
            self._compare(record.term)
            columns = (record.term, record.session, os.getpid(), record.host)
            columns_of_clock = (*msgspec.structs.astuple(record.clock), record.events)
            self._lease = link(self._lease, *columns, *columns_of_clock, record.last)
            self._connection.execute(
                "INSERT INTO lease VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*columns, *columns_of_clock, self._lease)
            )
            self._term = record.term
            leadership.begin(record.term)

    def _compare(self, term: int) -> None:
        """Hold the journal against what was noted of its end."""
        if self._head is None:
            return
        noted = sqlite_file.read_head(self._head)
        if noted is not None:
            self._require_head(noted)
        elif term > 1:
            _log.warning("%s is missing or cannot be read: a loss of the journal's end would not be seen", self._head)

    def _require_head(self, head: Head) -> None:
        """Raise JournalDamaged unless the journal has all that `head` says it had."""
        if head.origin != self._origin:
            raise damaged(self._path, "this is the journal of another job, or of an earlier run of this one")
        with sqlite_file.explained(self._path, "compare the journal with its last end"):
            row = self._connection.execute("SELECT chain FROM lease WHERE term = ?", (head.term,)).fetchone()
            lease = self._origin if head.term == 0 else row and row[0]
            chain = self._chain_at(head.events, self._origin)
            if chain is None and head.events < self._oldest():
                chain = head.chain  # the note could not be written for long; the journal has come much further
        if lease != head.lease:
            raise damaged(self._path, f"term {head.term} was in it, and is not any more")
        if chain is None:
            raise damaged(self._path, f"its end is lost: {head.events} events were in it, and {self._last[0]} are")
        if chain != head.chain:
            raise damaged(self._path, f"event {head.events} is not the one that was written")

    def last_term(self, first: bytes) -> TermRecord | None:
        """Return how the last term began; see `JournalStore`."""
        self._origin = self._lease = first
        last: TermRecord | None = None
        with sqlite_file.explained(self._path, "read the terms"):
            rows = self._connection.execute(
                "SELECT term, session, pid, host, boot, monotonic_s, began_s, events, chain FROM lease ORDER BY term"
            ).fetchall()
            for *columns, chain in rows:
                number, anchor = 1 if last is None else last.term + 1, self._chain_at(columns[-1], first)
                self._lease = link(self._lease, *columns, anchor)
                if columns[0] != number or chain != self._lease or anchor is None:
                    raise damaged(self._path, f"term {number} is missing, or is not what was written")
                term, session, pid, host, *clock, events = columns
                last = TermRecord(term, session, f"pid {pid}", host, ClockReading(*clock), events, anchor, chain)
        return last

    def end(self, first: bytes) -> End:
        """Return number and hash of the last event; see `JournalStore`."""
        with sqlite_file.explained(self._path, "read the last event"):
            self._last = self._last_event(first)
        return self._last

    def append(self, rows: Sequence[EventRow]) -> None:
        """Make events durable; see `JournalStore`. All that a turn has with one statement: each has its price."""
        with sqlite_file.explained(self._path, "record events"), self._fenced():
            columns = list(map(msgspec.structs.astuple, rows))
            if self._connection.executemany(_INSERT, columns).rowcount != len(rows):
                raise AlreadyWrittenError(self._written(rows))
        self._last = rows[-1].seq, rows[-1].chain
        self._note()

    def _written(self, rows: Sequence[EventRow]) -> frozenset[tuple[str, int, int]]:
        """Return which events were there before."""
        self._connection.execute("DELETE FROM events WHERE seq > ?", (self._last[0],))
        identities = ((row.sender, row.session, row.number) for row in rows if row.number is not None)
        return frozenset(each for each in identities if self._connection.execute(_KNOWN, each).fetchone())

    def weight_of(self, rows: Sequence[EventRow]) -> tuple[int, int]:
        """Return what events cost a takeover; see `JournalStore`."""
        return len(rows), sum(len(row.payload) for row in rows)

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        """Open a transaction in which this is the active controller, and the journal what it has written."""
        with sqlite_file.transaction(self._connection):
            if self._files is not None and not self._files.are_there():
                raise damaged(self._path, "it was deleted or replaced while this controller was writing it")
            latest = self._connection.execute("SELECT max(term) FROM lease").fetchone()[0]
            if latest is not None and latest > self._term:
                raise JournalSuperseded(
                    f"{self._path}: term {latest} has begun, this controller holds term {self._term}. "
                    "It is no longer the active one and must leave."
                )
            if latest != self._term or self._last_event(self._origin) != self._last:
                raise damaged(self._path, f"after event {self._last[0]} it was changed by another process")
            yield

    def _note(self) -> None:
        if self._note_file is not None:
            self._note_file.write(Head(self._origin, self._term, self._lease, *self._last))

    def write_snapshot(self, last: End, state: bytes, taken_in: TakenIn) -> None:
        """Keep the state after the last event; see `JournalStore`."""
        if self._in_memory:
            return
        columns = (*last, zlib.compress(state, _LEVEL), zlib.compress(taken_in.encode(), _LEVEL))
        with sqlite_file.explained(self._path, "compact the journal"), self._fenced():
            self._connection.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?)", (*columns, link(b"", *columns))
            )
        self._look_for_old_events()

    def tidy(self) -> None:
        """Archive a block of events that are before the last snapshot but one; see `JournalStore`."""
        if self._in_memory:
            return
        if not self._archive_to:
            self._look_for_old_events()
        if self._oldest_event > self._archive_to:
            return
        with sqlite_file.explained(self._path, "compact the journal"), self._fenced():
            self._archive()
            self._trim()
        self._look_for_old_events()

    def _look_for_old_events(self) -> None:
        if not sqlite_file.is_compacted(self._connection):
            return
        self._oldest_event = self._oldest()
        known = self._snapshots()
        self._archive_to = known[-2] if len(known) > 1 else -1

    def _archive(self) -> None:
        """Pack the first block of events that are not archived. In a transaction of the caller."""
        first = self._oldest_event
        following = [seq for seq in self._snapshots() if seq >= first]
        last = min(self._archive_to, first + BLOCK - 1, *following)  # no block lies on both sides of a snapshot
        run, between = self._connection.execute, (first, last)
        rows = run(f"SELECT {_COLUMNS} FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq", between)
        packed = zlib.compress(_encode(rows.fetchall()), _LEVEL)
        run("INSERT INTO archive VALUES (?, ?, ?)", (*between, packed))
        run(
            "INSERT OR IGNORE INTO anchors SELECT seq, chain FROM events"
            " WHERE seq BETWEEN ? AND ? AND seq IN (SELECT events FROM lease)",
            between,
        )
        run("DELETE FROM events WHERE seq BETWEEN ? AND ?", between)

    def _trim(self) -> None:
        """Drop the earliest archived events, up to a snapshot, until the rest is small. In a caller's transaction.

        The last two snapshots, and the events after the first of these, are never touched.
        """
        while self._kept_bytes() > self.limits.kept_bytes:
            first = self.first_kept()
            later = [seq for seq in self._snapshots() if seq >= first]
            if len(later) < 2:
                return
            self._connection.execute("DELETE FROM archive WHERE last <= ?", (later[0],))
            self._connection.execute("DELETE FROM snapshots WHERE seq < ?", (later[0],))

    def _kept_bytes(self) -> int:
        run = self._connection.execute
        archived = run("SELECT total(length(rows)) FROM archive").fetchone()[0]
        snapshots = run("SELECT total(length(state) + length(taken_in)) FROM snapshots").fetchone()[0]
        return int(archived + snapshots)

    def conclude(self, last: End, state: Callable[[], bytes], taken_in: TakenIn) -> None:
        """The file stays as it is, in the job's directory."""

    def require_newest(self) -> None:
        """Each transaction looks for a later term."""

    def close(self) -> None:
        """Close the files. Idempotent."""
        super().close()
        if self._note_file is not None:
            self._note_file.close()
            self._note_file = None


def found_journal(
    path: Path,
    job: JobSpec,
    policy: Policy,
    *,
    can_create_nodes: bool = False,
    head: Path | None = None,
    platform: str = "",
) -> None:
    """Found the journal of a new job, as Founding says; `head`: as in `open_sqlite`. Raises JournalError."""
    founding = new_founding(job, policy, can_create_nodes=can_create_nodes, platform=platform)
    first = origin(founding)
    sqlite_file.create(path, {FOUNDING: founding, ORIGIN: first})
    if head is not None:
        with sqlite_file.explained(head, "note the end of the journal"), HeadFile(head) as file:
            file.write(Head(first, 0, first, 0, first))


def open_sqlite(
    path: Path,
    *,
    wait_s: float | None = 0.0,
    head: Path | None = None,
    beat: Callable[[], None] = lambda: None,
    limits: Limits | None = None,
    election: Election | None = None,
) -> Journal:
    """Become the active controller of the job; see `open_journal`.

    `head`: a file outside the job directory in which the journal's end is noted, and with which it is compared.
    `election`: if not the one that `lock_path` stands for.
    """

    def connect(leadership: Leadership) -> SqliteStore:
        def beat_both() -> None:
            beat()
            leadership.beat()

        connection = sqlite_file.open_for_writing(path, beat_both)
        return SqliteStore(path, connection, head=head, limits=limits or Limits())

    if not path.is_file():
        sqlite_file.open_for_reading(path).close()  # says what is missing, before a lock file is made
    return open_journal(connect, election or FileElection(lock_path(path)), wait_s=wait_s, beat=beat)


class ReadLock:
    """The lock of a journal on a disk that cannot be written: taken all the same, but without leaving a name in it."""

    def __init__(self, path: Path) -> None:
        """Take the lock at once, if there is such a file. Raises JournalError when a controller holds it."""
        self._descriptor = -1
        with sqlite_file.explained(path, "take the lock"), contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise JournalError(
                    f"{path}: another controller is active on this journal. A copy of it must not act beside that one."
                ) from None

    def begin(self, term: int) -> None:
        """No process has to find a controller that only ends its job."""

    def beat(self) -> None:
        """No controller deposes it either."""

    def require(self) -> None:
        """It leads for as long as it lives."""

    def overthrow(self) -> bool:
        """It was waited for."""
        return False

    def close(self) -> None:
        """Let the next one in. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_copy(path: Path, *, head: Path | None = None) -> Journal:
    """Become the controller of the job with a copy of its journal in memory, as far as that can be read.

    It is enough to end the job in order, and for nothing else: the controller of last resort uses it
    (`controller.when_lost: stop`). What it records is lost with its process. `head`: the note of the journal's end,
    with which it is compared. Raises JournalError: it cannot be read, or another controller is active; JournalDamaged
    when it is not what was written.
    """
    with contextlib.ExitStack() as stack:
        lock = ReadLock(lock_path(path))
        stack.callback(lock.close)
        memory = sqlite3.connect(":memory:", isolation_level=None)
        stack.callback(memory.close)
        with (
            contextlib.closing(sqlite_file.open_for_reading(path)) as original,
            sqlite_file.explained(path, "copy the journal"),
        ):
            memory.text_factory = original.text_factory
            original.backup(memory)
        journal = Journal(SqliteStore(path, memory, head=head, limits=Limits(), in_memory=True), lock, "", lambda: None)
        stack.pop_all()
        return journal
