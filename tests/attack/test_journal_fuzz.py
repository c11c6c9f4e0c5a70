"""Random damage to the files of the journal"""

import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstep.controller.journal.reading import read_status
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_file import HEAD_NAME, journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.recovery.events import ControllerStarted, DeadlinePassed, Event, StopRequested
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.errors import JournalError
from midstep.protocol.messages import NodeJoined, NodeLost
from midstep.protocol.types import JobSpec, RunningProcess, StoreEndpoint

from .attack import attack
from .fuzzing import CASES, LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)

JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
EVENTS: tuple[Event, ...] = (
    NodeJoined("a", "rack", StoreEndpoint("127.0.0.1", 1), (RunningProcess(0, 99, 1, 1),)),
    ControllerStarted(1),
    DeadlinePassed(),
    NodeLost("a", "no word for 3.2 s", 7.0),
    StopRequested("enough"),
)
COLUMNS = {
    "events": ("seq", "term", "at_s", "sender", "session", "number", "kind", "payload", "chain"),
    "lease": ("term", "session", "pid", "host", "boot", "monotonic_s", "began_s", "events", "chain"),
    "meta": ("key", "value"),
}
Damage = Callable[[random.Random, Path], None]


def flip_a_column(chance: random.Random, job: Path) -> None:
    """One value of one row becomes a similar one, or one of another type."""
    table = chance.choice(["events", "events", "events", "lease", "meta"])
    column = chance.choice(COLUMNS[table])
    with sqlite3.connect(journal_path(job)) as connection:
        connection.text_factory = bytes
        rows = connection.execute(
            f"SELECT rowid, {column} FROM {table}" if table != "meta" else "SELECT key, value FROM meta"
        )
        row, value = chance.choice(rows.fetchall())
        where = "rowid" if table != "meta" else "key"
        if table == "meta" and column == "key":
            value = row
        new = chance.choice(
            [_similar(chance, value), _similar(chance, value), None, 0, -1.5, "x", b"x", 2**63 - 1, "\udcff"]
        )
        try:
            connection.execute(
                f"UPDATE {table} SET {column} = CAST(? AS {_kind(new)}) WHERE {where} = ?", (_plain(new), row)
            )
        except sqlite3.IntegrityError:  # what sqlite itself refuses
            connection.rollback()
    connection.close()


def _kind(value: object) -> str:
    return {int: "INTEGER", float: "REAL", str: "TEXT"}.get(type(value), "BLOB")


def _plain(value: object) -> object:
    return value.encode(errors="surrogateescape") if isinstance(value, str) else value


def _similar(chance: random.Random, value: object) -> object:
    if isinstance(value, bytes) and value:
        place = chance.randrange(len(value))
        return value[:place] + bytes([value[place] ^ 1 << chance.randrange(8)]) + value[place + 1 :]
    if isinstance(value, int | float):
        return value + chance.choice((-1, 1, 3600))
    return 1


def remove_or_swap_rows(chance: random.Random, job: Path) -> None:
    """Rows of the middle or the end are gone, or change their places."""
    with sqlite3.connect(journal_path(job)) as connection:
        count = connection.execute("SELECT count(*) FROM events").fetchone()[0]
        first, second = sorted(chance.sample(range(1, count + 1), 2))
        for statement in chance.choice(
            [
                [f"DELETE FROM events WHERE seq BETWEEN {first} AND {second}"],
                [f"DELETE FROM events WHERE seq > {first}"],
                [f"DELETE FROM events WHERE seq > {first}", "DELETE FROM lease WHERE term > 1"],
                [
                    f"UPDATE events SET seq = {old} WHERE seq = {new}"
                    for old, new in ((-1, first), (first, second), (second, -1))
                ],
                [f"UPDATE events SET seq = seq + 1000 WHERE seq > {first}"],
            ]
        ):
            connection.execute(statement)
    connection.close()


def flip_bytes_of_a_file(chance: random.Random, job: Path) -> None:
    """Some bits of the journal or of its log are wrong."""
    path = chance.choice(_files(job))
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 8, 200))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut_a_file(chance: random.Random, job: Path) -> None:
    """The end of the journal or of its log is gone, or is of zeros."""
    path = chance.choice(_files(job))
    size = chance.randrange(path.stat().st_size)
    length = path.stat().st_size
    os.truncate(path, size)
    if chance.random() < 0.3:
        os.truncate(path, length)


def splice_a_file(chance: random.Random, job: Path) -> None:
    """A page is where another one was."""
    path = chance.choice(_files(job))
    data = path.read_bytes()
    source, target = (chance.randrange(len(data)) // 512 * 512 for _ in range(2))
    length = chance.choice((512, 4096))
    path.write_bytes((data[:target] + data[source : source + length] + data[target + length :])[: len(data)])


def _files(job: Path) -> list[Path]:
    return [path for path in sorted(job.glob("journal.sqlite*")) if path.suffix != ".lock" and path.stat().st_size > 0]


DAMAGES: tuple[Damage, ...] = (flip_a_column, remove_or_swap_rows, flip_bytes_of_a_file, cut_a_file, splice_a_file)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: each case waits for the disk otherwise."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ms-", dir=memory if memory.is_dir() else tmp_path) as directory:
        yield Path(directory)


@pytest.fixture
def good(place: Path) -> Path:
    """A job whose second controller was killed: some of its journal is in the file, and some in the log."""
    job, kept = place / "good", place / "kept"
    job.mkdir()
    head = place / HEAD_NAME
    found_journal(journal_path(job), JOB, default_policy(), head=head)
    for term in range(2):
        journal = open_sqlite(journal_path(job), head=head)
        for number in range(20):
            event = EVENTS[number % len(EVENTS)]
            journal.append([JournalEntry(event, "node/a", term + 1, number)], 100.0 + number)
        if term:
            shutil.copytree(job, kept)
        journal.close()
    return kept


@attack(
    "random damage to the journal: any column, row, byte or page of its files",
    holds="a controller replays all that was written, or refuses with the reason; it never acts on anything else",
    reads="the record that is not what was written, or sqlite's own words, and what to do",
)
def test_a_damaged_journal_is_replayed_whole_or_refused(good: Path, place: Path) -> None:
    """Any other exception is a bug, and so is a world that is not the one that was written."""
    chance = random.Random(20)
    job, head = place / "job", place / "run" / HEAD_NAME
    head.parent.mkdir()
    shutil.copytree(good, job)
    shutil.copy(good.parent / HEAD_NAME, head)
    with open_sqlite(journal_path(job), head=head) as journal:
        written = list(journal.replay())
    assert len(written) == 40
    refused = 0
    for _ in range(CASES):
        shutil.rmtree(job)
        shutil.copytree(good, job)
        shutil.copy(good.parent / HEAD_NAME, head)
        chance.choice(DAMAGES)(chance, job)
        try:
            with open_sqlite(journal_path(job), head=head) as journal:
                replayed = list(journal.replay())
        except JournalError:
            refused += 1
            _status_is_refused_or_read(job)
        else:
            assert replayed == written
    assert refused > CASES / 3


def _status_is_refused_or_read(job: Path) -> None:
    try:
        read_status(job)
    except JournalError:
        return
