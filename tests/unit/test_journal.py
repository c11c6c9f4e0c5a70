"""The journal: what it promises about durability, order, repetition, terms, and about files that are not journals."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from midstep.controller.journal.journal import Journal
from midstep.controller.journal.reading import read_status
from midstep.controller.journal.records import JournalEntry, link
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.recovery.events import (
    ControllerStarted,
    DeadlinePassed,
    Event,
    InjectRequested,
    StopRequested,
)
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.errors import JournalError, JournalSuperseded
from midstep.protocol.messages import NodeJoined, RankJoined
from midstep.protocol.types import (
    ArmedFault,
    FaultAction,
    InjectionPoint,
    JobSpec,
    LocalStateCopy,
    RunningProcess,
    ShardHold,
    StepReport,
    StoreEndpoint,
)

JOB = JobSpec(
    job="demo",
    command=("train.py", "--steps", "10"),
    is_module=False,
    no_python=False,
    environment={"A": "1"},
    working_directory="/tmp",
    job_directory="/tmp/demo",
    world_size=4,
    ranks_per_node=2,
    nodes=2,
    spare_nodes=1,
    max_restarts=3,
    settings=job_settings(default_policy(), "/tmp/demo"),
)
REPORT = StepReport(3, True, True, (ShardHold("all", 40),), ("all",), (LocalStateCopy(1, 3),), checkpoints=(2,))
EVENTS: tuple[Event, ...] = (
    NodeJoined("node0", "rack0", StoreEndpoint("127.0.0.1", 4242), (RunningProcess(0, 99, 1, 1),)),
    RankJoined(1, 1, 1, 77, REPORT, 0.5),
    DeadlinePassed(),
    ControllerStarted(7),
    InjectRequested(ArmedFault(2, FaultAction.HANG, InjectionPoint.BARRIER, 4)),
    StopRequested("enough"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = journal_path(tmp_path)
    found_journal(file, JOB, default_policy(), can_create_nodes=True)
    return file


def entry(event: Event, number: int, sender: str = "node/node0", session: int = 5) -> JournalEntry:
    return JournalEntry(event, sender, session, number)


def taken_in(journal: Journal) -> dict[tuple[str, int], set[int]]:
    """What would not be taken in again, by sender and session."""
    return {
        (name, known.session): {number for number in range(known.highest + 1) if known.was_acknowledged(number)}
        for name, known in journal.taken_in()
    }


def test_replay_returns_every_event_with_its_time_in_order(path: Path) -> None:
    with open_sqlite(path) as journal:
        for number, event in enumerate(EVENTS, start=1):
            assert journal.append([entry(event, number)], 100.0 + number) == (True,)
    with open_sqlite(path) as journal:
        replayed = list(journal.replay())
    assert replayed == [(event, 100.0 + number) for number, event in enumerate(EVENTS, start=1)]


def test_job_and_policy_come_back_as_they_were_founded(path: Path) -> None:
    with open_sqlite(path) as journal:
        assert journal.founding.job == JOB
        assert journal.founding.policy == default_policy()
        assert journal.founding.can_create_nodes


def test_a_message_is_recorded_once_per_sender_session_and_number(path: Path) -> None:
    with open_sqlite(path) as journal:
        first = entry(DeadlinePassed(), 1)
        assert journal.append([first, first], 1.0) == (True, False)
        assert journal.append([first], 2.0) == (False,)
        others = [entry(DeadlinePassed(), 1, session=6), entry(DeadlinePassed(), 1, sender="rank/0")]
        assert journal.append(others, 3.0) == (True, True)
        assert len(list(journal.replay())) == 3


def test_messages_without_a_number_are_never_taken_for_repetitions(path: Path) -> None:
    with open_sqlite(path) as journal:
        assert journal.append([entry(DeadlinePassed(), 0), entry(DeadlinePassed(), 0)], 1.0) == (True, True)
        assert len(list(journal.replay())) == 2


def test_what_was_taken_in_is_that_of_the_latest_session_of_each_sender(path: Path) -> None:
    """And nothing of the controller's own."""
    with open_sqlite(path) as journal:
        entries = [
            entry(DeadlinePassed(), 1, "node/a", 5),
            entry(DeadlinePassed(), 1, "node/a", 6),
            entry(DeadlinePassed(), 2, "node/a", 6),
            entry(DeadlinePassed(), 9, "rank/0", 3),
            entry(DeadlinePassed(), 0, "rank/1", 3),
            entry(DeadlinePassed(), 1, "controller", 1),
        ]
        journal.append(entries, 1.0)
        before = taken_in(journal)
    with open_sqlite(path) as journal:
        assert len(list(journal.load(lambda state: None))) == 6
        assert taken_in(journal) == before == {("node/a", 6): {1, 2}, ("rank/0", 3): {9}}


def test_each_opening_has_a_higher_term_and_session(path: Path) -> None:
    openings = []
    for _ in range(4):
        with open_sqlite(path) as journal:
            openings.append((journal.term, journal.session))
    assert [term for term, _ in openings] == [1, 2, 3, 4]
    assert openings == sorted(set(openings))


def test_the_session_grows_even_when_the_clock_was_set_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_sqlite(path) as journal:
        first = journal.session
    monkeypatch.setattr(time, "time_ns", lambda: first - 10**18)
    with open_sqlite(path) as journal:
        assert journal.session == first + 1


def test_a_second_controller_is_refused_while_the_first_is_active_and_told_who_it_is(path: Path) -> None:
    with open_sqlite(path), pytest.raises(JournalError, match=f"another controller is active .*pid {os.getpid()}"):
        open_sqlite(path)
    with open_sqlite(path) as journal:
        assert journal.term == 2  # the refused one had none


def test_a_second_controller_that_waits_takes_over_when_the_first_ends(path: Path) -> None:
    first = open_sqlite(path)
    timer = threading.Timer(0.2, first._leadership.close)  # what the kernel does when its holder ends
    timer.start()
    try:
        with open_sqlite(path, wait_s=30) as second:
            assert second.term == 2
    finally:
        timer.join()
        first.close()


def test_a_controller_whose_term_is_over_can_record_nothing(path: Path) -> None:
    with open_sqlite(path) as journal:
        journal._leadership.close()  # as if its lock were on a file system that forgets locks
        with open_sqlite(path) as later:
            with pytest.raises(JournalSuperseded, match="term 2 has begun"):
                journal.append([entry(DeadlinePassed(), 1)], 1.0)
            assert list(later.replay()) == []


def test_the_file_is_for_its_owner_only(path: Path) -> None:
    with open_sqlite(path) as journal:
        journal.append([entry(DeadlinePassed(), 1)], 1.0)
        modes = {file.name: file.stat().st_mode & 0o077 for file in path.parent.iterdir()}
    assert set(modes.values()) == {0}, modes


def test_no_second_job_in_one_directory(path: Path) -> None:
    with pytest.raises(JournalError, match="already been run"):
        found_journal(path, JOB, default_policy())
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_missing_journal_is_named_and_no_file_is_left(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal"):
        open_sqlite(journal_path(tmp_path))
    with pytest.raises(JournalError, match="there is no journal"):
        read_status(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_no_database_are_refused_with_path_and_advice(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    path.write_bytes(os.urandom(8192))
    for read in (lambda: open_sqlite(path), lambda: read_status(tmp_path)):
        with pytest.raises(JournalError, match=r"journal\.sqlite: cannot open .*another job directory"):
            read()


def test_another_programs_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE meta (key, value)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match="not a journal of midstep"):
        open_sqlite(path)
    assert path.read_bytes() == before


def test_a_journal_of_another_version_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalError, match="schema 99"):
        open_sqlite(path)


def test_a_damaged_journal_is_refused(path: Path) -> None:
    with open_sqlite(path) as journal:
        journal.append([entry(EVENTS[1], number) for number in range(1, 500)], 1.0)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = os.urandom(4096)
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"is damaged .*another job directory"):
        open_sqlite(path)


def test_an_event_that_this_version_does_not_know_is_named(path: Path) -> None:
    with open_sqlite(path) as journal:
        journal.append([entry(DeadlinePassed(), 1)], 1.0)
    payload = bytes.fromhex("81a474797065a44e6f7065")
    with sqlite3.connect(path) as connection:
        (before,) = connection.execute("SELECT value FROM meta WHERE key = 'origin'").fetchone()
        columns = (1, 1, 1.0, "node/node0", 5, 1, "Nope", payload)
        connection.execute("UPDATE events SET payload = ?, kind = 'Nope', chain = ?", (payload, link(before, *columns)))
    connection.close()
    with open_sqlite(path) as journal, pytest.raises(JournalError, match=r"event 1 \(Nope\)"):
        list(journal.replay())


def test_status_is_read_beside_a_running_controller_and_afterwards(path: Path) -> None:
    with open_sqlite(path) as journal:
        journal.append([entry(ControllerStarted(journal.term), 1, "controller", journal.session)], 123.0)
        status = read_status(path.parent)
    assert (status.job, status.term, status.at_s, len(status.ranks)) == ("demo", 1, 123.0, 4)
    assert read_status(path.parent) == status


def test_status_of_a_finished_job_is_read_where_nothing_may_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_sqlite(path).close()
    before = sorted(path.parent.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert read_status(path.parent).job == "demo"
    assert sorted(path.parent.iterdir()) == before


WRITER = """
import sys
from pathlib import Path
from midstep.controller.recovery.events import StopRequested
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_store import open_sqlite
journal = open_sqlite(Path(sys.argv[1]))
for number in range(1, 1_000_000):
    journal.append([JournalEntry(StopRequested(str(number)), "node/a", 1, number)], float(number))
    print(number, flush=True)
"""


def test_no_acknowledged_event_is_lost_when_the_writer_is_killed(path: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        try:
            acknowledged = 0
            until = time.monotonic() + 0.3
            for line in writer.stdout:
                acknowledged = int(line)
                if time.monotonic() > until and acknowledged > 20:
                    break
        finally:
            writer.send_signal(signal.SIGKILL)
            acknowledged = max([acknowledged, *(int(line) for line in writer.stdout.read().split("\n")[:-1])])
            writer.wait(10)
            writer.stdout.close()
        with open_sqlite(path) as journal:
            numbers = [int(event.reason) for event, _ in journal.replay() if isinstance(event, StopRequested)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= acknowledged > 20


def append_until_it_fails(journal: Journal) -> None:
    for number in range(1, 5000):
        assert journal.append([entry(EVENTS[1], number)], 1.0) == (True,)


def test_a_full_disk_loses_nothing_and_writing_goes_on_when_there_is_space_again(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_sqlite(path) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, hard))
        try:
            with pytest.raises(JournalError, match=r"cannot record events.*(Look for a full|Free space)") as caught:
                append_until_it_fails(journal)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        done = len(list(journal.replay()))
        assert str(path) in str(caught.value)
        assert 0 < done < 4999
        assert journal.append([entry(EVENTS[1], done + 1)], 2.0) == (True,)
    with open_sqlite(path) as journal:
        assert len(list(journal.replay())) == done + 1
