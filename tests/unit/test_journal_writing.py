"""Events of a turn are written with one statement, and a repeated one among them is left out."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.controller.journal.journal import Journal
from midstep.controller.journal.records import JournalEntry, link, origin
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import FOUNDING, found_journal, open_sqlite
from midstep.controller.recovery.events import ControllerStarted
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.types import JobSpec

JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The journal of a new job."""
    found_journal(journal_path(tmp_path), JOB, default_policy())
    return journal_path(tmp_path)


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    """That journal, open."""
    with open_sqlite(path) as opened:
        yield opened


def entry(number: int, sender: str = "node/a") -> JournalEntry:
    return JournalEntry(ControllerStarted(number), sender, 1, number)


def written(path: Path) -> list[tuple[int, str, int]]:
    """Return number, sender and its number of each event, after a look at the chain."""
    with sqlite3.connect(path) as connection:
        (founding,) = connection.execute("SELECT value FROM meta WHERE key = ?", (FOUNDING,)).fetchone()
        rows = connection.execute("SELECT * FROM events ORDER BY seq").fetchall()
    connection.close()
    chain = origin(founding)
    for *columns, hashed in rows:
        assert hashed == link(chain, *columns)
        chain = hashed
    return [(row[0], row[3], row[5]) for row in rows]


def test_new_events_are_all_written(journal: Journal, path: Path) -> None:
    assert journal.append([entry(1), entry(2), entry(1, "node/b")], 5.0) == (True, True, True)
    assert written(path) == [(1, "node/a", 1), (2, "node/a", 2), (3, "node/b", 1)]


def test_repeated_events_leave_no_gap(journal: Journal, path: Path) -> None:
    """Whether they were there before or come twice at once: numbers and hashes are those of what is written."""
    journal.append([entry(1)], 5.0)
    assert journal.append([entry(2), entry(1), entry(3), entry(2)], 6.0) == (True, False, True, False)
    assert written(path) == [(1, "node/a", 1), (2, "node/a", 2), (3, "node/a", 3)]
    journal.append([entry(4)], 7.0)
    assert [seq for seq, _, _ in written(path)] == [1, 2, 3, 4]


def test_an_event_that_only_the_file_knows_of_is_not_written_again(path: Path) -> None:
    """The journal of a controller that has not read what came before."""
    with open_sqlite(path) as first:
        first.append([entry(1), entry(2)], 5.0)
    with open_sqlite(path) as second:
        assert second.append([entry(3), entry(1), entry(2), entry(4)], 6.0) == (True, False, False, True)
    assert written(path) == [(1, "node/a", 1), (2, "node/a", 2), (3, "node/a", 3), (4, "node/a", 4)]


def test_nothing_is_written_of_no_events(journal: Journal, path: Path) -> None:
    assert journal.append([], 5.0) == ()
    assert written(path) == []
