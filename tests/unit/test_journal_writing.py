"""Events of a turn are written with one statement, and a repeated one among them is left out."""

import sqlite3
from collections.abc import Iterator

import pytest

from midstep.controller.journal import sqlite_file
from midstep.controller.journal.chain import link, origin
from midstep.controller.journal.store import JournalEntry
from midstep.controller.journal.writing import insert
from midstep.controller.recovery.events import ControllerStarted

FIRST = (0, origin(b"a job"))


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    made = sqlite3.connect(":memory:", isolation_level=None)
    made.executescript(sqlite_file._SCHEMA)
    with sqlite_file.transaction(made):
        yield made
    made.close()


def entry(number: int, sender: str = "node/a") -> JournalEntry:
    return JournalEntry(ControllerStarted(number), sender, 1, number)


def written(connection: sqlite3.Connection) -> list[tuple[int, str, int]]:
    """Return number, sender and its number of each event, after a look at the chain."""
    rows = connection.execute("SELECT * FROM events ORDER BY seq").fetchall()
    chain = FIRST[1]
    for *columns, hashed in rows:
        assert hashed == link(chain, *columns)
        chain = hashed
    return [(row[0], row[3], row[5]) for row in rows]


def test_new_events_are_all_written(connection: sqlite3.Connection) -> None:
    done = insert(connection, [entry(1), entry(2), entry(1, "node/b")], term=1, at_s=5.0, last=FIRST)
    assert done.fresh == (True, True, True)
    assert done.last[0] == 3
    assert written(connection) == [(1, "node/a", 1), (2, "node/a", 2), (3, "node/b", 1)]


def test_repeated_events_leave_no_gap(connection: sqlite3.Connection) -> None:
    """Whether they were there before or come twice at once: numbers and hashes are those of what is written."""
    before = insert(connection, [entry(1)], term=1, at_s=5.0, last=FIRST)
    repeated = [entry(2), entry(1), entry(3), entry(2)]
    done = insert(connection, repeated, term=1, at_s=6.0, last=before.last)
    assert done.fresh == (True, False, True, False)
    assert written(connection) == [(1, "node/a", 1), (2, "node/a", 2), (3, "node/a", 3)]
    more = insert(connection, [entry(4)], term=1, at_s=7.0, last=done.last)
    assert more.last[0] == 4
    assert [seq for seq, _, _ in written(connection)] == [1, 2, 3, 4]


def test_nothing_is_written_of_no_events(connection: sqlite3.Connection) -> None:
    assert insert(connection, [], term=1, at_s=5.0, last=FIRST).last == FIRST
