"""The truth about a job: every event that its recovery machine was given, durable before anything follows from it.

A controller that was killed opens the same journal, folds the events into a new machine, and continues in the phase in
which its predecessor died. Each opening is a new *term*, which fences the commands of all earlier ones. A journal that
is not what was written is refused: to act on an older world would kill healthy ranks.
"""

import contextlib
import logging
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from ..policies.schema import Policy
from ..protocol.errors import JournalSuperseded
from ..protocol.incidents import JobStatus
from ..protocol.types import CONTROLLER, JobSpec
from . import journal_file, journal_records
from .clock import Clock
from .events import Event
from .journal_chain import damaged, link, origin
from .journal_head import Head, HeadFile, read_head
from .journal_records import Founding
from .state.meeting import KEY_BYTES
from .story import StoryEntry, turns

JOURNAL_NAME = "journal.sqlite"

_log = logging.getLogger(__name__)


class JournalEntry(msgspec.Struct, frozen=True):
    """An event and where it came from. `number` 0: not numbered, so it cannot be distinguished from a repetition."""

    event: Event
    sender: str
    session: int
    number: int


_encode_event = msgspec.msgpack.Encoder().encode


def journal_path(job_directory: str | Path) -> Path:
    """Return where the journal of a job lies."""
    return Path(job_directory) / JOURNAL_NAME


class WriterLock(Protocol):
    """What keeps other controllers out while a journal is open."""

    def close(self) -> None:
        """Let the next one in."""


class Journal:
    """The journal, open for its one writer. `term` and `session` are higher than those of every earlier opening."""

    def __init__(self, path: Path, lock: WriterLock, connection: sqlite3.Connection, note: HeadFile | None) -> None:
        """Not for callers: `Journal.open`, `journal_copy.open_copy`."""
        self._path = path
        self._lock = lock
        self._closing = contextlib.ExitStack()
        self._connection = connection
        self._note_file = note
        self._files: journal_file.OpenFiles | None = None
        self.founding, self._origin = journal_records.read_founding(connection, path)
        self._leases = journal_records.read_leases(connection, path, self._origin)
        with journal_file.explained(path, "read the last event"):
            self._last = journal_records.last_event(connection, self._origin)
        self.clock = Clock.continuing(self._leases.clock)
        self.term = self._leases.term + 1
        self.session = max(time.time_ns(), self._leases.session + 1)  # also when the clock was set back

    @staticmethod
    def create(
        path: Path, job: JobSpec, policy: Policy, *, can_create_nodes: bool = False, head: Path | None = None
    ) -> None:
        """Found the journal of a new job. Raises JournalError if there is one already or it cannot be written.

        `can_create_nodes`: the platform can make nodes beyond those that the job starts with. `head`: as in `open`.
        """
        key = secrets.token_bytes(KEY_BYTES)
        founding = msgspec.msgpack.encode(Founding(job, policy, can_create_nodes, time.time(), key))
        first = origin(founding)
        journal_file.create(path, {journal_records.FOUNDING: founding, journal_records.ORIGIN: first})
        if head is not None:
            with journal_file.explained(head, "note the end of the journal"), HeadFile(head) as file:
                file.write(Head(first, 0, first, 0, first))

    @classmethod
    def open(
        cls, path: Path, *, wait_s: float = 0.0, head: Path | None = None, beat: Callable[[], None] = lambda: None
    ) -> "Journal":
        """Become the active controller of the job: take the lock (waiting up to `wait_s`) and begin a new term.

        `head`: a file outside the job directory in which the journal's end is noted, and with which it is compared.
        `beat` is called now and then, also later in what takes long: a big journal is no hang.

        Raises JournalError: no such file, not a journal, not writable, or another controller is active; JournalDamaged
        when it is not what was written.
        """
        if not path.is_file():
            journal_file.open_for_reading(path).close()  # says what is missing, before a lock file is made
        with contextlib.ExitStack() as stack:
            lock = journal_file.FileLock(path.with_name(path.name + ".lock"), wait_s, beat)
            stack.callback(lock.close)
            connection = journal_file.open_for_writing(path, beat)
            stack.callback(connection.close)
            return cls.begin(path, lock, connection, stack, head=head)

    @classmethod
    def begin(
        cls,
        path: Path,
        lock: WriterLock,
        connection: sqlite3.Connection,
        closing: contextlib.ExitStack,
        *,
        head: Path | None,
        in_memory: bool = False,
    ) -> "Journal":
        """Begin a new term on an open connection. For `Journal.open` and `journal_copy.open_copy`.

        `closing` closes what is open, and is the journal's from then on. `in_memory`: the connection is to a copy, so
        that neither the file of that name nor the note of its end is looked after. Raises as `open` does.
        """
        note = None
        if head is not None and not in_memory:
            with journal_file.explained(head, "open the note of the journal's end"):
                note = closing.enter_context(HeadFile(head))
        journal = cls(path, lock, connection, note)
        if head is not None:
            journal._compare(head)
        journal._begin_term()
        if not in_memory:
            with journal_file.explained(path, "look at the journal"):
                journal._files = journal_file.OpenFiles(path)
        journal._closing = closing.pop_all()
        return journal

    def _compare(self, head: Path) -> None:
        """Hold the journal against what was noted of its end."""
        noted = read_head(head)
        if noted is not None:
            journal_records.require_head(self._connection, self._path, noted, self._origin)
        elif self.term > 1:
            _log.warning("%s is missing or cannot be read: a loss of the journal's end would not be seen", head)

    def _begin_term(self) -> None:
        now = self.clock.reading()
        events, chain = self._last
        columns = (self.term, self.session, os.getpid(), socket.gethostname(), *msgspec.structs.astuple(now), events)
        lease = link(self._leases.chain, *columns, chain)
        with journal_file.explained(self._path, "begin a term"), journal_file.transaction(self._connection):
            self._connection.execute("INSERT INTO lease VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*columns, lease))
        self._lease = lease
        self._note()

    def append(self, entries: Sequence[JournalEntry], at_s: float) -> tuple[bool, ...]:
        """Make events durable, all or none; False marks those that were there already.

        `at_s` is the controller's time that the machine is given with them. Raises JournalError when they are not
        durable (nothing may follow from them then), JournalSuperseded when a later term has begun, JournalDamaged when
        the file is not the one any more that this controller has written.
        """
        self._last, fresh = self._append(entries, float(at_s))
        self._note()
        return fresh

    def _append(self, entries: Sequence[JournalEntry], at_s: float) -> tuple[tuple[int, bytes], tuple[bool, ...]]:
        with journal_file.explained(self._path, "record events"), journal_file.transaction(self._connection):
            if self._files is not None and not self._files.are_there():
                raise damaged(self._path, "it was deleted or replaced while this controller was writing it")
            latest = self._connection.execute("SELECT max(term) FROM lease").fetchone()[0]
            if latest is not None and latest > self.term:
                raise JournalSuperseded(
                    f"{self._path}: term {latest} has begun, this controller holds term {self.term}. "
                    "It is no longer the active one and must leave."
                )
            last = journal_records.last_event(self._connection, self._origin)
            if latest != self.term or last != self._last:
                raise damaged(self._path, f"after event {self._last[0]} it was changed by another process")
            fresh = []
            for entry in entries:
                written = self._insert(entry, at_s, last)
                last = last if written is None else written
                fresh.append(written is not None)
        return last, tuple(fresh)

    def _insert(self, entry: JournalEntry, at_s: float, last: tuple[int, bytes]) -> tuple[int, bytes] | None:
        """Write an event behind the `last` one; return its number and hash, None when it was there already."""
        kind, payload = type(entry.event).__name__, _encode_event(entry.event)
        columns = (last[0] + 1, self.term, at_s, entry.sender, entry.session, entry.number or None, kind, payload)
        chain = link(last[1], *columns)
        cursor = self._connection.execute(
            "INSERT INTO events (seq, term, at_s, sender, session, number, kind, payload, chain)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (sender, session, number) DO NOTHING",
            (*columns, chain),
        )
        return (columns[0], chain) if cursor.rowcount == 1 else None

    def _note(self) -> None:
        if self._note_file is not None:
            self._note_file.write(Head(self._origin, self.term, self._lease, *self._last))

    def replay(self) -> Iterator[tuple[Event, float]]:
        """Yield every event with the time it was handled at, in order. Raises JournalDamaged where it is not whole."""
        yield from journal_records.read_events(self._connection, self._path, self._origin)

    def seen(self) -> Iterator[tuple[str, int, int]]:
        """Yield (sender, session, number) of what was taken in from each sender's latest session."""
        with journal_file.explained(self._path, "read what was received"):
            yield from self._connection.execute(
                "SELECT sender, session, number FROM events JOIN"
                " (SELECT sender AS who, max(session) AS latest FROM events GROUP BY sender)"
                " ON sender = who AND session = latest"
                " WHERE number IS NOT NULL AND sender != ? ORDER BY sender, number",
                (CONTROLLER,),
            )

    def close(self) -> None:
        """Close the files and let another controller in."""
        self._closing.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_founding(job_directory: str | Path) -> Founding:
    """Return what the journal of a job was founded with. Raises JournalError."""
    with _reading(job_directory) as (founding, _):
        return founding


def read_status(job_directory: str | Path) -> JobStatus:
    """Return the job's status as of its last event, from the journal alone, without any process.

    May be called beside a running controller; nothing is changed. Raises JournalError.
    """
    with _reading(job_directory) as (founding, events):
        machine, last_s = founding.machine(), founding.created_s
        for event, at_s in events:
            machine.handle(event, at_s)
            last_s = at_s
        return machine.status(last_s)


def read_story(job_directory: str | Path) -> Iterator[StoryEntry]:
    """Yield each event of the journal with what followed from it. As `read_status` in all else."""
    with _reading(job_directory) as (founding, events):
        yield from turns(founding.machine(), events)


@contextlib.contextmanager
def _reading(job_directory: str | Path) -> Iterator[tuple[Founding, Iterator[tuple[Event, float]]]]:
    path = journal_path(job_directory)
    with contextlib.closing(journal_file.open_for_reading(path)) as connection:
        founding, first = journal_records.read_founding(connection, path)
        yield founding, journal_records.read_events(connection, path, first)
