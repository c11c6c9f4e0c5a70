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

import msgspec

from ...policies.schema import Policy
from ...protocol.errors import ElectionLost, JournalError, JournalSuperseded
from ...protocol.mailbox import SenderMemory
from ...protocol.types import JobSpec
from ..clock import Clock
from ..election.election import Election, Leadership
from ..election.file_election import FileElection
from ..recovery.events import Event
from ..recovery.state import KEY_BYTES
from . import records, snapshots, sqlite_file, writing
from .chain import damaged, link, origin
from .compaction import Compaction, CompactionStep, Limits
from .head import Head, HeadFile, read_head
from .paths import lock_path
from .records import Founding
from .senders import TakenIn
from .store import JournalEntry

_log = logging.getLogger(__name__)


class Journal:
    """The journal, open for its one writer. `term` and `session` are higher than those of every earlier opening."""

    def __init__(
        self,
        path: Path,
        lock: Leadership,
        connection: sqlite3.Connection,
        note: HeadFile | None,
        limits: Limits | None = None,
    ) -> None:
        """Not for callers: `Journal.open`, `memory_copy.open_copy`."""
        self._path = path
        self._lock = lock
        self._closing = contextlib.ExitStack()
        self._connection = connection
        self._note_file = note
        self._files: sqlite_file.OpenFiles | None = None
        self._taken_in = TakenIn()
        self._compaction = Compaction(limits or Limits())
        self.founding, self._origin = records.read_founding(connection, path)
        self._leases = records.read_leases(connection, path, self._origin)
        with sqlite_file.explained(path, "read the last event"):
            self._last = records.last_event(connection, self._origin)
        self.clock = Clock.continuing(self._leases.clock)
        self.term = self._leases.term + 1
        self.session = max(time.time_ns(), self._leases.session + 1)  # also when the clock was set back

    @staticmethod
    def create(
        path: Path,
        job: JobSpec,
        policy: Policy,
        *,
        can_create_nodes: bool = False,
        head: Path | None = None,
        platform: str = "",
    ) -> None:
        """Found the journal of a new job, as Founding says; `head`: as in `open`. Raises JournalError."""
        key = secrets.token_bytes(KEY_BYTES)
        founding = msgspec.msgpack.encode(Founding(job, policy, can_create_nodes, time.time(), key, platform))
        first = origin(founding)
        sqlite_file.create(path, {records.FOUNDING: founding, records.ORIGIN: first})
        if head is not None:
            with sqlite_file.explained(head, "note the end of the journal"), HeadFile(head) as file:
                file.write(Head(first, 0, first, 0, first))

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        wait_s: float | None = 0.0,
        head: Path | None = None,
        beat: Callable[[], None] = lambda: None,
        limits: Limits | None = None,
        election: Election | None = None,
    ) -> "Journal":
        """Become the active controller of the job: be elected (waiting up to `wait_s`) and begin a new term.

        `head`: a file outside the job directory in which the journal's end is noted, and with which it is compared.
        `beat` is called now and then, also later in what takes long: a big journal is no hang. `limits`: when it is
        compacted, if not as usual. `election`: if not the one that `lock_path` stands for.

        Raises JournalError: no such file, not a journal, not writable, or another controller is active; JournalDamaged
        when it is not what was written.
        """
        if not path.is_file():
            sqlite_file.open_for_reading(path).close()  # says what is missing, before a lock file is made
        while True:
            with contextlib.ExitStack() as stack, contextlib.suppress(ElectionLost):
                lock = (election or FileElection(lock_path(path))).stand(wait_s, beat)
                stack.callback(lock.close)
                return cls._lead(path, lock, stack, head=head, beat=beat, limits=limits)

    @classmethod
    def _lead(
        cls,
        path: Path,
        lock: Leadership,
        stack: contextlib.ExitStack,
        *,
        head: Path | None,
        beat: Callable[[], None],
        limits: Limits | None,
    ) -> "Journal":
        def beat_both() -> None:
            beat()
            lock.beat()

        connection = sqlite_file.open_for_writing(path, beat_both)
        stack.callback(connection.close)
        sqlite_file.wait_for_writers(connection, sqlite_file.BLOCKED_S)
        try:
            journal = cls.begin(path, lock, connection, stack, head=head, limits=limits)
        except JournalError as error:
            if not sqlite_file.is_busy(error):
                raise
            lock.overthrow()
            sqlite_file.wait_for_writers(connection, sqlite_file.BUSY_S)
            return cls.begin(path, lock, connection, stack, head=head, limits=limits)
        sqlite_file.wait_for_writers(connection, sqlite_file.BUSY_S)
        return journal

    @classmethod
    def begin(
        cls,
        path: Path,
        lock: Leadership,
        connection: sqlite3.Connection,
        closing: contextlib.ExitStack,
        *,
        head: Path | None,
        in_memory: bool = False,
        limits: Limits | None = None,
    ) -> "Journal":
        """Begin a new term on an open connection. For `Journal.open` and `memory_copy.open_copy`.

        `closing` closes what is open, and is the journal's from then on. `in_memory`: the connection is to a copy, so
        that neither the file of that name nor the note of its end is looked after. Raises as `open` does.
        """
        note = None
        if head is not None and not in_memory:
            with sqlite_file.explained(head, "open the note of the journal's end"):
                note = closing.enter_context(HeadFile(head))
        with sqlite_file.explained(path, "begin a term"), sqlite_file.transaction(connection):
            # A leader that was deposed may wake up at any moment: what it has written, it has written before this.
            journal = cls(path, lock, connection, note, limits)
            if head is not None:
                journal._compare(head)
            journal._begin_term()
            lock.begin(journal.term)
        journal._note()
        if not in_memory:
            with sqlite_file.explained(path, "look at the journal"):
                journal._files = sqlite_file.OpenFiles(path)
        journal._closing = closing.pop_all()
        return journal

    def _compare(self, head: Path) -> None:
        """Hold the journal against what was noted of its end."""
        noted = read_head(head)
        if noted is not None:
            records.require_head(self._connection, self._path, noted, self._origin)
        elif self.term > 1:
            _log.warning("%s is missing or cannot be read: a loss of the journal's end would not be seen", head)

    def _begin_term(self) -> None:
        now = self.clock.reading()
        events, chain = self._last
        columns = (self.term, self.session, os.getpid(), socket.gethostname(), *msgspec.structs.astuple(now), events)
        lease = link(self._leases.chain, *columns, chain)
        self._connection.execute("INSERT INTO lease VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*columns, lease))
        self._lease = lease

    def append(self, entries: Sequence[JournalEntry], at_s: float) -> tuple[bool, ...]:
        """Make events durable, all or none; False marks those that were there already.

        `at_s` is the controller's time that the machine is given with them. Raises JournalError when they are not
        durable (nothing may follow from them then), JournalSuperseded when a later term has begun, JournalDamaged when
        the file is not the one any more that this controller has written.
        """
        self._last, fresh = self._append(entries, float(at_s))
        self._note()
        for entry, new in zip(entries, fresh, strict=True):
            if new:
                self._taken_in.take(entry.sender, entry.session, entry.number or None)
        return fresh

    def _append(self, entries: Sequence[JournalEntry], at_s: float) -> tuple[tuple[int, bytes], tuple[bool, ...]]:
        with sqlite_file.explained(self._path, "record events"), self._fenced():
            written = writing.insert(self._connection, entries, term=self.term, at_s=at_s, last=self._last)
        self._compaction.grown(len(entries), written.size_bytes)
        return written.last, written.fresh

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        """Open a transaction in which this is the active controller, and the journal what it has written."""
        with sqlite_file.transaction(self._connection):
            if self._files is not None and not self._files.are_there():
                raise damaged(self._path, "it was deleted or replaced while this controller was writing it")
            latest = self._connection.execute("SELECT max(term) FROM lease").fetchone()[0]
            if latest is not None and latest > self.term:
                raise JournalSuperseded(
                    f"{self._path}: term {latest} has begun, this controller holds term {self.term}. "
                    "It is no longer the active one and must leave."
                )
            last = records.last_event(self._connection, self._origin)
            if latest != self.term or last != self._last:
                raise damaged(self._path, f"after event {self._last[0]} it was changed by another process")
            yield

    def _note(self) -> None:
        if self._note_file is not None:
            self._note_file.write(Head(self._origin, self.term, self._lease, *self._last))

    def load(
        self, restore: Callable[[bytes], None], beat: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Event, float]]:
        """Have the newest snapshot restored, if there is one, and yield the events after it with their times, in order.

        `restore` raises SnapshotUnreadable for a snapshot that it cannot read; then an earlier one is taken. Read it to
        the end before anything is appended. Raises JournalDamaged where the journal is not whole.
        """
        start = records.begin(self._connection, self._path, self._origin, restore)
        self._taken_in = start.taken_in
        self._compaction.begin(self._connection, start.seq)
        for event, at_s in records.read_events(self._connection, self._path, start, beat):
            self._compaction.grown(1, 0)
            yield event, at_s

    def require_lead(self) -> None:
        """Raise JournalSuperseded when another controller leads by now, e.g. after this process stood still."""
        self._lock.require()
        self._lock.beat()

    def replay(self) -> Iterator[tuple[Event, float]]:
        """Yield every event that is kept with its time, in order, whether a snapshot has it or not."""
        start = records.begin_early(self._connection, self._path, self._origin, lambda state: None)
        yield from records.read_events(self._connection, self._path, start)

    def taken_in(self) -> Iterator[tuple[str, SenderMemory]]:
        """Yield what was taken in from each sender, in its latest session. Known once `load` has been read."""
        return self._taken_in.senders()

    def compact(self, snapshot: Callable[[], bytes], *, quiet: bool) -> None:
        """Write a snapshot when enough events have come since the last one, or archive some that are before the last.

        Short, so that it can be done between two turns; at a `quiet` moment rather than in the middle of an incident.
        `snapshot` returns the state after the last event. Raises as `append` does; nothing is lost or changed then.
        """
        if self._files is None:  # a copy in memory
            return
        step = self._compaction.next_step(quiet=quiet)
        if step is CompactionStep.NONE:
            return
        with sqlite_file.explained(self._path, "compact the journal"), self._fenced():
            if step is CompactionStep.SNAPSHOT:
                snapshots.write(self._connection, self._last, snapshot(), self._taken_in)
            else:
                self._compaction.archive(self._connection)
        self._compaction.begin(self._connection, self._last[0] if step is CompactionStep.SNAPSHOT else None)

    def conclude(self, snapshot: Callable[[], bytes]) -> None:
        """The file stays as it is, in the job's directory."""

    def close(self) -> None:
        """Close the files and let another controller in."""
        self._closing.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
