"""A job as its journal tells of it: read-only, without any process, beside a running controller or long afterwards.

A journal is found by its job directory, by the folder of several machines that holds it, or by its place in etcd.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ...protocol.incidents import JobStatus
from ...protocol.slow_records import SlowTold
from ..etcd.place import EtcdPlace
from ..journaled import handled, together
from ..learned import read_snapshot
from ..recovery.machine import RecoveryMachine
from ..slow_history import SlowHistory
from ..story import StoryEntry, turns
from ..time_account import TimeAccount
from . import sqlite_file
from .journal import JournalReader, earliest_start, events_behind, find_start
from .records import Founding, origin
from .records import read_founding as decode_founding
from .sqlite_store import SqliteReader
from .volume_place import holds_journal
from .volume_store import VolumeReader

Where = str | Path | EtcdPlace


def read_founding(where: Where) -> Founding:
    """Return what the journal of a job was founded with. Raises JournalError."""
    with _reading(where) as (_, founding, _):
        return founding


def read_status(where: Where) -> JobStatus:
    """Return the job's status as of its last event, from the journal alone. Changes nothing. Raises JournalError."""
    return read_history(where)[0]


def read_history(where: Where) -> tuple[JobStatus, SlowTold]:
    """Return the job's status, and which nodes were named slow. As `read_status` in all else."""
    machine, times, slow, last_s = _replayed(where)
    return times.told(machine.status(last_s)), slow.told()


def read_times(where: Where) -> TimeAccount:
    """Return the account of a job's time as of its last event. As `read_status` in all else."""
    return _replayed(where)[1]


def _replayed(where: Where) -> tuple[RecoveryMachine, TimeAccount, SlowHistory, float]:
    """Return machine, account and slow nodes behind the last event, and when that was."""
    with _reading(where) as (journal, founding, first):
        machine, times, slow, last_s = founding.machine(), TimeAccount(), SlowHistory(), founding.created_s

        def restore(state: bytes) -> None:
            nonlocal last_s, times, slow
            snapshot = read_snapshot(state)
            machine.restore(snapshot.machine)
            last_s, times, slow = snapshot.at_s, snapshot.times, snapshot.slow

        for event, at_s in events_behind(journal, find_start(journal, first, restore, journal.snapshots())):
            for events in together((event,)):
                handled(machine, events, at_s)
                times.follow(machine.state, events[-1], at_s)
                slow.follow(machine.state, events[-1], at_s)
            last_s = at_s
        return machine, times, slow, last_s


def read_story(where: Where) -> Iterator[StoryEntry]:
    """Yield each event that the journal still has, with what followed from it. As `read_status` in all else.

    The first one has number 1 unless earlier ones were dropped, so that the journal of a long job stays bounded.
    """
    with _reading(where) as (journal, founding, first):
        machine = founding.machine()
        start = earliest_start(journal, first, lambda state: machine.restore(read_snapshot(state).machine))
        yield from turns(machine, events_behind(journal, start), start.seq + 1)


@contextlib.contextmanager
def _reading(where: Where) -> Iterator[tuple[JournalReader, Founding, bytes]]:
    with contextlib.ExitStack() as stack:
        journal: JournalReader
        if isinstance(where, EtcdPlace):
            from .etcd_store import reading as in_etcd

            journal = stack.enter_context(in_etcd(where))
        elif holds_journal(Path(where)):
            journal = VolumeReader(Path(where))
        else:
            path = sqlite_file.journal_path(where)
            journal = SqliteReader(path, sqlite_file.open_for_reading(path))
            stack.callback(journal.close)
        content = journal.founding()
        yield journal, decode_founding(journal, content), origin(content)
