"""A journal of a long job: what a takeover reads is bounded, and so is the file; nothing acknowledged is lost."""

import contextlib
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from midstep.cli.report import command
from midstep.controller.journal import sqlite_store
from midstep.controller.journal.journal import Journal, Limits
from midstep.controller.journal.reading import read_founding, read_status, read_story
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.journaled import Journaled, decided
from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.recovery.events import Event
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.routes import Routes
from midstep.policies.schema import default_policy
from midstep.protocol.errors import JournalDamaged, JournalError, SnapshotUnreadable
from midstep.protocol.messages import FaultReported, NodeJoined
from midstep.protocol.types import FaultKind, FaultReport, StoreEndpoint

from .test_journal import JOB, taken_in

LIMITS = Limits(events=20, size_bytes=1 << 20, kept_bytes=1 << 20)
MANY = 150
BATCH = 5  # events in one transaction


def _connection(journal: Journal) -> sqlite3.Connection:
    store = journal._store
    assert isinstance(store, sqlite_store.SqliteStore)
    return store._connection


class Place:
    """One job's journal, and what a controller that has replayed all of its events would know."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = journal_path(directory)
        self.head = directory / "head"
        self.told: list[tuple[Journaled, float]] = []
        found_journal(self.path, JOB, default_policy(), head=self.head)

    @contextlib.contextmanager
    def controller(self, limits: Limits = LIMITS) -> Iterator[tuple[Journal, Learned, int]]:
        """Take over; also how many events that took."""
        with open_sqlite(self.path, head=self.head, limits=limits) as journal:
            learned = Learned(journal.founding.machine(), Routes(), Liveness(default_policy().heartbeat))
            replayed = 0
            for event, at_s in journal.load(learned.restore):
                learned.take(event, at_s)
                replayed += 1
            yield journal, learned, replayed

    def run(self, count: int, limits: Limits = LIMITS) -> None:
        """Be the controller for so many events."""
        with self.controller(limits) as (journal, learned, _):
            for _ in range(count // BATCH):
                self.tell(journal, learned, BATCH)
                journal.compact(learned.snapshot, quiet=True)

    def tell(self, journal: Journal, learned: Learned, count: int = 1) -> None:
        first = len(self.told) + 1
        numbers, at_s = range(first, first + count), 1000.0 + first
        entries = [JournalEntry(_event(number), f"node/node{number % 3}", 7, number) for number in numbers]
        assert all(journal.append(entries, at_s))
        for entry in entries:
            self.told.append((entry.event, at_s))
            learned.take(entry.event, at_s)

    def machine(self) -> RecoveryMachine:
        """A machine that has replayed all events."""
        machine = read_founding(self.directory).machine()
        for event, at_s in self.told:
            decided(machine, event, at_s)
        return machine

    def rows(self, table: str) -> int:
        with contextlib.closing(sqlite3.connect(self.path)) as other:
            return int(other.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def change(self, *statements: str) -> None:
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as stranger:
            for statement in statements:
                stranger.execute(statement)


def _event(number: int) -> Event:
    if number <= 3:
        return NodeJoined(f"node{number - 1}", "rack0", StoreEndpoint("127.0.0.1", number))
    return FaultReported(
        FaultReport(FaultKind.DEVICE, float(number), "detector/d", "", node="node9", code=f"C{number}")
    )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_takeover_reads_no_more_events_than_the_limit_however_many_there_were(place: Place) -> None:
    for _ in range(4):
        place.run(MANY)
        with place.controller() as (_, learned, replayed):
            assert replayed <= LIMITS.events
            assert learned.machine.memory() == place.machine().memory()


def test_what_was_taken_in_is_known_across_snapshots(place: Place) -> None:
    place.run(MANY)
    with place.controller() as (journal, _, _):
        known = taken_in(journal)
    expected: dict[tuple[str, int], set[int]] = {}
    for number in range(1, MANY + 1):
        expected.setdefault((f"node/node{number % 3}", 7), set()).add(number)
    assert known == expected


def test_the_whole_story_is_told_while_all_events_are_kept(place: Place) -> None:
    place.run(MANY)
    assert place.rows("events") < 3 * LIMITS.events < MANY
    story = list(read_story(place.directory))
    assert [(turn.number, turn.event) for turn in story] == [
        (number, event) for number, (event, _) in enumerate(place.told, start=1)
    ]
    with open_sqlite(place.path) as journal:
        assert list(journal.replay()) == place.told


def test_the_file_of_a_long_job_does_not_grow_and_its_story_begins_later(place: Place) -> None:
    limits = Limits(events=20, size_bytes=1 << 20, kept_bytes=20_000)
    sizes = []
    for _ in range(5):
        place.run(2 * MANY, limits)
        sizes.append(place.path.stat().st_size)
    # Events differ in length, so a page more or less is in use. 900 events that were kept would be many pages.
    assert sizes[-1] <= sizes[1] + 4096
    story = list(read_story(place.directory))
    assert 1 < story[0].number <= len(place.told) - LIMITS.events
    assert [turn.number for turn in story] == list(range(story[0].number, len(place.told) + 1))
    assert story[-1].event == place.told[-1][0]
    printed = CliRunner().invoke(command, [str(place.directory), "--story"])
    assert f"events before number {story[0].number} are not kept" in printed.output
    assert len(read_status(place.directory).faults) == len(place.machine().status(0.0).faults)


def test_a_controller_killed_at_any_point_of_a_compaction_has_lost_nothing(place: Place, tmp_path: Path) -> None:
    """Its files are kept as they are in front of each statement that it gives to sqlite, and another one takes over."""
    place.run(3 * LIMITS.events + 5)
    kept: list[tuple[Path, int]] = []
    with place.controller() as (journal, learned, _):

        def keep(statement: str) -> None:
            copy = tmp_path / "kept" / str(len(kept))
            copy.mkdir(parents=True)
            for file in place.directory.glob("journal.sqlite*"):
                if not file.name.endswith("-shm"):
                    shutil.copy(file, copy)
            shutil.copy(place.head, copy)
            kept.append((copy, len(place.told)))

        for _ in range(LIMITS.events + 3):
            place.tell(journal, learned)
            _connection(journal).set_trace_callback(keep)
            journal.compact(learned.snapshot, quiet=True)
            _connection(journal).set_trace_callback(None)
    assert len(kept) > 20
    for copy, acknowledged in kept:
        head = copy / "head"
        with open_sqlite(copy / place.path.name, head=head, limits=LIMITS) as journal:
            learned = Learned(journal.founding.machine(), Routes(), Liveness(default_policy().heartbeat))
            for event, at_s in journal.load(learned.restore):
                learned.take(event, at_s)
            assert journal._last[0] == acknowledged
            assert [event for event, _ in journal.replay()] == [event for event, _ in place.told[:acknowledged]]


def test_a_journal_of_an_earlier_version_is_read_as_before_and_compacted_when_it_is_continued(place: Place) -> None:
    place.run(MANY, Limits(events=10_000))
    place.change("DROP TABLE snapshots", "DROP TABLE archive", "DROP TABLE anchors", "PRAGMA user_version = 2")
    before = place.path.read_bytes()
    status = read_status(place.directory)
    assert len(list(read_story(place.directory))) == MANY
    assert place.path.read_bytes() == before
    place.run(MANY)
    with place.controller() as (_, learned, replayed):
        assert replayed <= LIMITS.events
        assert learned.machine.memory() == place.machine().memory()
    assert status.job == read_status(place.directory).job


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE snapshots SET state = x'00' WHERE seq = (SELECT max(seq) FROM snapshots)",
        "UPDATE snapshots SET chain = x'00' WHERE seq = (SELECT max(seq) FROM snapshots)",
        "DELETE FROM snapshots WHERE seq = (SELECT max(seq) FROM snapshots)",
    ],
)
def test_a_snapshot_that_cannot_be_read_is_passed_over_for_an_earlier_one(place: Place, damage: str) -> None:
    place.run(MANY)
    place.change(damage)
    with place.controller() as (_, learned, replayed):
        assert LIMITS.events < replayed <= 2 * LIMITS.events
        assert learned.machine.memory() == place.machine().memory()


def test_without_any_snapshot_that_this_version_reads_all_events_are_replayed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.run(MANY)
    monkeypatch.setattr("midstep.controller.learned.FORMAT", 99)
    with place.controller() as (_, learned, replayed):
        assert replayed == MANY
        assert learned.machine.memory() == place.machine().memory()


def test_when_neither_a_snapshot_nor_the_first_events_are_there_it_is_said_what_to_do(place: Place) -> None:
    place.run(4 * MANY, Limits(events=20, size_bytes=1 << 20, kept_bytes=10_000))

    def refuse(state: bytes) -> None:
        raise SnapshotUnreadable("it has format 99")

    with (
        open_sqlite(place.path) as journal,
        pytest.raises(JournalError, match=r"before number \d+ are not kept .* format 99.*version that wrote it"),
    ):
        list(journal.load(refuse))


def test_an_archived_event_that_was_changed_is_not_told(place: Place) -> None:
    place.run(MANY)
    with contextlib.closing(sqlite3.connect(place.path)) as stranger, stranger:
        (rows,) = stranger.execute("SELECT rows FROM archive WHERE first = 1").fetchone()
        other = zlib.compress(zlib.decompress(rows).replace(b"rack0", b"rack1"))
        stranger.execute("UPDATE archive SET rows = ? WHERE first = 1", (other,))
    with pytest.raises(JournalDamaged, match="event 1 "):
        list(read_story(place.directory))


def test_terms_that_began_with_archived_events_are_still_checked(place: Place) -> None:
    for _ in range(8):
        place.run(LIMITS.events)
    assert place.rows("anchors") > 0
    with place.controller() as (journal, _, _):
        assert journal.term == 9
    place.change("UPDATE anchors SET chain = x'00' WHERE seq = (SELECT max(seq) FROM anchors)")
    with pytest.raises(JournalDamaged, match=r"term \d is missing, or is not what was written"):
        open_sqlite(place.path)


def test_an_old_note_of_the_end_does_not_condemn_a_journal_that_has_come_further(place: Place) -> None:
    place.run(5)
    note = place.head.read_bytes()
    place.run(4 * MANY, Limits(events=20, size_bytes=1 << 20, kept_bytes=10_000))
    place.head.write_bytes(note)  # it could not be written since
    with place.controller() as (journal, _, _):
        assert journal._last[0] == len(place.told)


def test_a_reader_goes_on_while_what_it_reads_is_archived(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "_REPLAY_CHUNK", 10)
    place.run(LIMITS.events - 1)
    story = read_story(place.directory)
    told = [next(story).event]
    place.run(MANY)
    told += [turn.event for turn in story]
    assert told == [event for event, _ in place.told]


def test_in_the_middle_of_an_incident_a_snapshot_waits_up_to_twice_the_limit(place: Place) -> None:
    with place.controller() as (journal, learned, _):
        for _ in range(2 * LIMITS.events - 1):
            place.tell(journal, learned)
            journal.compact(learned.snapshot, quiet=False)
        assert place.rows("snapshots") == 0
        place.tell(journal, learned)
        journal.compact(learned.snapshot, quiet=False)
        assert place.rows("snapshots") == 1


def test_a_full_disk_during_a_compaction_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.controller() as (journal, learned, _):
        for _ in range(LIMITS.events):
            place.tell(journal, learned)

        def full(*columns: object) -> bytes:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(sqlite_store, "link", full)
            with pytest.raises(JournalError, match="cannot compact the journal"):
                journal.compact(learned.snapshot, quiet=True)
        place.tell(journal, learned)
        journal.compact(learned.snapshot, quiet=True)
        assert place.rows("snapshots") == 1
