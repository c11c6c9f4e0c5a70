"""When a journal is compacted: so that a takeover reads less than a second's worth, and its file stays bounded.

Measured on two cores (`benchmarks/controller_restart.py`): 40,000 to 75,000 events are replayed in a second.
"""

import enum
import sqlite3

import msgspec

from . import archive, snapshots, sqlite_file


class Limits(msgspec.Struct, frozen=True):
    """When a snapshot is due, by what has come since the last one; at any moment, not only a quiet one, at twice that.

    `kept_bytes`: of archived events and earlier snapshots. What is older is dropped: reports still have every incident,
    `midstep report --story` begins later.
    """

    events: int = 10_000
    size_bytes: int = 4 * 1024 * 1024
    kept_bytes: int = 64 * 1024 * 1024


URGENT = 2  # times the limit


class CompactionStep(enum.Enum):
    """What is to be done next."""

    NONE = "nothing"
    SNAPSHOT = "write a snapshot"
    ARCHIVE = "archive a block of events"


class Growth:
    """What has come since the last snapshot."""

    def __init__(self, limits: Limits) -> None:
        """Nothing is due before `restart`."""
        self._limits = limits
        self._begun = False
        self._events = 0
        self._bytes = 0

    def restart(self) -> None:
        """Count from here: after a takeover, and after each snapshot."""
        self._begun, self._events, self._bytes = True, 0, 0

    def grown(self, events: int, size_bytes: int) -> None:
        """Count what has come."""
        self._events += events
        self._bytes += size_bytes

    @property
    def any(self) -> bool:
        """Whether anything has come."""
        return self._begun and self._events > 0

    def is_due(self, *, quiet: bool) -> bool:
        """Say whether a snapshot is to be written now."""
        times = 1 if quiet else URGENT
        return self.any and (
            self._events >= times * self._limits.events or self._bytes >= times * self._limits.size_bytes
        )


class Compaction:
    """What has come since the last snapshot, and what lies in front of the one before."""

    def __init__(self, limits: Limits) -> None:
        """Nothing is due before `begin`."""
        self._limits = limits
        self._growth = Growth(limits)
        self._oldest = 1  # event that is not archived
        self._archive_to = 0

    def begin(self, connection: sqlite3.Connection, snapshot: int | None) -> None:
        """Look at the journal: after a takeover, and after each step. `snapshot`: the event of the one just used."""
        if snapshot is not None:
            self._growth.restart()
        if not sqlite_file.is_compacted(connection):
            return
        self._oldest = archive.oldest_event(connection)
        known = snapshots.numbers(connection)
        self._archive_to = known[-2] if len(known) > 1 else 0

    def grown(self, events: int, size_bytes: int) -> None:
        """Count what has come."""
        self._growth.grown(events, size_bytes)

    def next_step(self, *, quiet: bool) -> CompactionStep:
        """Return what is to be done now; nothing in most turns."""
        if self._growth.is_due(quiet=quiet):
            return CompactionStep.SNAPSHOT
        archives = quiet and self._growth.any and self._oldest <= self._archive_to
        return CompactionStep.ARCHIVE if archives else CompactionStep.NONE

    def archive(self, connection: sqlite3.Connection) -> None:
        """Archive a block of events, and drop what is too old. Inside a transaction of the caller."""
        archive.pack(connection, self._oldest, self._archive_to)
        archive.trim(connection, self._limits.kept_bytes)
