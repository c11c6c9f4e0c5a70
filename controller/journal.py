"""The truth about a job: every event that its recovery machine was given, durable before anything follows from it.

A controller that was killed opens the same journal, folds the events into a new machine, and goes on in the phase in
which its predecessor died. Each opening is a new *term*, which fences the commands of all earlier ones.
"""

import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from ..policies.schema import Policy
from ..protocol.errors import JournalError, JournalSuperseded
from ..protocol.incidents import JobStatus
from ..protocol.types import CONTROLLER, JobSpec
from . import journal_file
from .events import Event
from .machine import RecoveryMachine

JOURNAL_NAME = "journal.sqlite"
_REPLAY_CHUNK = 500
_FOUNDING = "founding"


class Founding(msgspec.Struct, frozen=True):
    """What a job's machine starts from, and what never changes afterwards. `created_s`: wall-clock seconds."""

    job: JobSpec
    policy: Policy
    can_create_nodes: bool
    created_s: float

    def machine(self) -> RecoveryMachine:
        """Return a machine to which nothing has happened yet."""
        return RecoveryMachine(self.policy, self.job, can_create_nodes=self.can_create_nodes)


class Entry(msgspec.Struct, frozen=True):
    """An event and where it came from. `number` 0: not numbered, so it cannot be told from a repetition."""

    event: Event
    sender: str
    session: int
    number: int


_encode_event = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(Event).decode


def journal_path(job_directory: str | Path) -> Path:
    """Return where the journal of a job lies."""
    return Path(job_directory) / JOURNAL_NAME


class Lock(Protocol):
    """What keeps other controllers out while a journal is open."""

    def close(self) -> None:
        """Let the next one in."""


class Journal:
    """The journal, open for its one writer. `term` and `session` are higher than those of every earlier opening."""

    def __init__(self, path: Path, lock: Lock, connection: sqlite3.Connection) -> None:
        """Not for callers: `Journal.open`, `journal_copy.open_copy`."""
        self._path = path
        self._lock = lock
        self._connection = connection
        self.term = 0
        self.session = 0
        self.founding = read_founding(connection, path)
        self._begin_term()

    @staticmethod
    def create(path: Path, job: JobSpec, policy: Policy, *, can_create_nodes: bool = False) -> None:
        """Found the journal of a new job. Raises JournalError if there is one already or it cannot be written.

        `can_create_nodes`: the platform can make nodes beyond those that the job starts with.
        """
        founding = Founding(job, policy, can_create_nodes, time.time())
        journal_file.create(path, {_FOUNDING: msgspec.msgpack.encode(founding)})

    @classmethod
    def open(cls, path: Path, *, wait_s: float = 0.0, beat: Callable[[], None] = lambda: None) -> Self:
        """Become the active controller of the job: take the lock (waiting up to `wait_s`) and begin a new term.

        `beat` is called now and then, also later in what takes long: a big journal is no hang.

        Raises JournalError: no such file, not a journal, damaged, not writable, or another controller is active.
        """
        if not path.is_file():
            journal_file.open_for_reading(path).close()  # says what is missing, before a lock file is made
        lock = journal_file.Lock(path.with_name(path.name + ".lock"), wait_s, beat)
        try:
            connection = journal_file.open_for_writing(path, beat)
            try:
                return cls(path, lock, connection)
            except BaseException:
                connection.close()
                raise
        except BaseException:
            lock.close()
            raise

    def _begin_term(self) -> None:
        with journal_file.explained(self._path, "begin a term"), journal_file.transaction(self._connection):
            last = self._connection.execute("SELECT max(term), max(session) FROM lease").fetchone()
            self.term = (last[0] or 0) + 1
            self.session = max(time.time_ns(), (last[1] or 0) + 1)  # also when the clock was set back
            self._connection.execute(
                "INSERT INTO lease VALUES (?, ?, ?, ?, ?)",
                (self.term, self.session, os.getpid(), socket.gethostname(), time.time()),
            )

    def append(self, entries: Sequence[Entry], at_s: float) -> tuple[bool, ...]:
        """Make events durable, all or none; False marks those that were there already.

        `at_s` is the wall-clock time that the machine is given with them. Raises JournalError when they are not durable
        (nothing may follow from them then), JournalSuperseded when a later term has begun.
        """
        with journal_file.explained(self._path, "record events"), journal_file.transaction(self._connection):
            latest = self._connection.execute("SELECT max(term) FROM lease").fetchone()[0]
            if latest != self.term:
                raise JournalSuperseded(
                    f"{self._path}: term {latest} has begun, this controller holds term {self.term}. "
                    "It is no longer the active one and must leave."
                )
            return tuple(self._insert(entry, at_s) for entry in entries)

    def _insert(self, entry: Entry, at_s: float) -> bool:
        cursor = self._connection.execute(
            "INSERT INTO events (term, at_s, sender, session, number, kind, payload) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (sender, session, number) DO NOTHING",
            (
                self.term,
                at_s,
                entry.sender,
                entry.session,
                entry.number or None,
                type(entry.event).__name__,
                _encode_event(entry.event),
            ),
        )
        return cursor.rowcount == 1

    def replay(self) -> Iterator[tuple[Event, float]]:
        """Yield every event with the time it was handled at, in order."""
        return read_events(self._connection, self._path)

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
        """Close the file and let another controller in."""
        self._connection.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_founding(connection: sqlite3.Connection, path: Path) -> Founding:
    """Return what the journal was founded with."""
    with journal_file.explained(path, "read the job from the journal"):
        row = connection.execute("SELECT value FROM meta WHERE key = ?", (_FOUNDING,)).fetchone()
    try:
        return msgspec.msgpack.decode(row[0] if row else b"", type=Founding)
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"{path}: the job in the journal cannot be read: {error}. Use the midstep version that wrote it."
        ) from error


def read_events(connection: sqlite3.Connection, path: Path) -> Iterator[tuple[Event, float]]:
    """Yield every event with its time, in order, from an open journal."""
    last = 0
    while True:
        with journal_file.explained(path, "read events"):
            rows = connection.execute(
                "SELECT seq, at_s, kind, payload FROM events WHERE seq > ? ORDER BY seq LIMIT ?",
                (last, _REPLAY_CHUNK),
            ).fetchall()
        if not rows:
            return
        for seq, at_s, kind, payload in rows:
            try:
                event = _decode_event(payload)
            except msgspec.MsgspecError as error:
                raise JournalError(
                    f"{path}: event {seq} ({kind}) cannot be read: {error}. Use the midstep version that wrote it."
                ) from error
            yield event, at_s
            last = seq


def read_status(job_directory: str | Path) -> JobStatus:
    """Return the job's status as of its last event, from the journal alone: nobody has to be alive.

    May be called beside a running controller; nothing is changed. Raises JournalError.
    """
    path = journal_path(job_directory)
    connection = journal_file.open_for_reading(path)
    try:
        founding = read_founding(connection, path)
        machine = founding.machine()
        last_s = founding.created_s
        for event, at_s in read_events(connection, path):
            machine.handle(event, at_s)
            last_s = at_s
        return machine.status(last_s)
    finally:
        connection.close()
