"""A job as its journal tells of it: read-only, without any process, beside a running controller or long afterwards."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from ...protocol.incidents import JobStatus
from ..learned import read_snapshot
from ..recovery.machine import RecoveryMachine
from ..story import StoryEntry, turns
from . import records, sqlite_file
from .paths import journal_path
from .records import Founding


def read_founding(job_directory: str | Path) -> Founding:
    """Return what the journal of a job was founded with. Raises JournalError."""
    with _reading(job_directory) as (_, _, founding, _):
        return founding


def read_status(job_directory: str | Path) -> JobStatus:
    """Return the job's status as of its last event, from the journal alone, without any process.

    May be called beside a running controller; nothing is changed. Raises JournalError.
    """
    with _reading(job_directory) as (path, connection, founding, first):
        machine, last_s = founding.machine(), founding.created_s

        def restore(state: bytes) -> None:
            nonlocal last_s
            last_s = restore_from(machine, state)

        start = records.begin(connection, path, first, restore)
        for event, at_s in records.read_events(connection, path, start):
            machine.handle(event, at_s)
            last_s = at_s
        return machine.status(last_s)


def read_story(job_directory: str | Path) -> Iterator[StoryEntry]:
    """Yield each event that the journal still has, with what followed from it. As `read_status` in all else.

    The first one has number 1 unless earlier ones were dropped, so that the journal of a long job stays bounded.
    """
    with _reading(job_directory) as (path, connection, founding, first):
        machine = founding.machine()
        start = records.begin_early(connection, path, first, lambda state: restore_from(machine, state))
        yield from turns(machine, records.read_events(connection, path, start), start.seq + 1)


def restore_from(machine: RecoveryMachine, state: bytes) -> float:
    """Have the machine stand where a snapshot was taken, and return when that was. Raises SnapshotUnreadable."""
    snapshot = read_snapshot(state)
    machine.restore(snapshot.machine)
    return snapshot.at_s


@contextlib.contextmanager
def _reading(job_directory: str | Path) -> Iterator[tuple[Path, sqlite3.Connection, Founding, bytes]]:
    path = journal_path(job_directory)
    with contextlib.closing(sqlite_file.open_for_reading(path)) as connection:
        founding, first = records.read_founding(connection, path)
        yield path, connection, founding, first
