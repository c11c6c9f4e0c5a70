"""An election among real processes: one leads; a dead or frozen one is replaced, and harms nothing."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from midstep.controller.election.file_election import BEAT_S, FileElection
from midstep.controller.election.succession import FileSuccession
from midstep.controller.journal.journal import Journal
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_file import journal_path, lock_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.recovery.events import StopRequested
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.errors import JournalError, JournalSuperseded
from midstep.protocol.types import JobSpec

JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
LEASE_S = 1.0
PATIENCE_S = 60.0

LEADER = """
import os, signal, sys, time
from pathlib import Path
from midstep.controller.recovery.events import StopRequested
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_store import open_sqlite

def say(text):
    journal.append([JournalEntry(StopRequested(text), "node/a", 1, 0)], 1.0)

journal = open_sqlite(Path(sys.argv[1]))
say("first")
print("leads", flush=True)
if sys.argv[2] == "beats":
    while True:
        journal.require_lead()
        time.sleep(0.05)
if sys.argv[2] == "frozen in a write":
    journal._store._connection.set_trace_callback(
        lambda statement: os.kill(os.getpid(), signal.SIGSTOP) if statement == "COMMIT" else None
    )
    say("never durable")
os.kill(os.getpid(), signal.SIGSTOP)
for harm in (lambda: say("late"), journal.require_lead, lambda: journal.compact(lambda: b"", quiet=True)):
    try:
        harm()
        print("nothing", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


class Leader:
    """A process that leads."""

    def __init__(self, path: Path, does: str) -> None:
        command = [sys.executable, "-c", LEADER, str(path), does]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.line() == "leads"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = journal_path(tmp_path)
    found_journal(made, JOB, default_policy())
    return made


@pytest.fixture
def leaders(path: Path) -> Iterator[list[Leader]]:
    made: list[Leader] = []
    yield made
    for leader in made:
        leader.close()


def successor(path: Path, lease_s: float | None = LEASE_S, wait_s: float | None = None) -> Journal:
    return open_sqlite(path, wait_s=wait_s, election=FileElection(lock_path(path), lease_s=lease_s))


def told(journal: Journal) -> list[str]:
    return [event.reason for event, _ in journal.replay() if isinstance(event, StopRequested)]


def test_a_leader_that_shows_signs_of_life_is_left_alone(path: Path, leaders: list[Leader]) -> None:
    leaders.append(Leader(path, "beats"))
    with pytest.raises(JournalError, match=f"another controller is active .*pid {leaders[0].process.pid}"):
        successor(path, wait_s=3 * LEASE_S)


def test_a_leader_that_is_killed_is_followed_at_once(path: Path, leaders: list[Leader]) -> None:
    leaders.append(Leader(path, "beats"))
    leaders[0].process.kill()
    with successor(path, lease_s=None) as journal:
        assert (journal.term, told(journal)) == (2, ["first"])


def test_a_frozen_leader_is_deposed_and_can_write_nothing_when_it_wakes_up(path: Path, leaders: list[Leader]) -> None:
    leaders.append(Leader(path, "frozen"))
    with successor(path) as journal:
        assert journal.term == 2
        leaders[0].process.send_signal(signal.SIGCONT)
        assert [leaders[0].line() for _ in range(3)] == ["JournalSuperseded", "JournalSuperseded", "nothing"]
        assert journal.append([JournalEntry(StopRequested("second"), "node/a", 1, 0)], 2.0) == (True,)
        assert told(journal) == ["first", "second"]
        time.sleep(2 * BEAT_S)
        journal.require_lead()  # the lead is not harmed by the one that leaves
    with successor(path, lease_s=None, wait_s=0.0) as third:
        assert third.term == 3


def test_a_leader_that_is_frozen_in_the_middle_of_a_write_does_not_hold_up_its_successor(
    path: Path, leaders: list[Leader]
) -> None:
    """It has the database's lock; what it was about to write was never durable, and is undone."""
    leaders.append(Leader(path, "frozen in a write"))
    with successor(path) as journal:
        assert (journal.term, told(journal)) == (2, ["first"])
    assert leaders[0].process.wait(PATIENCE_S) == -signal.SIGKILL


def test_without_a_lease_a_frozen_leader_is_waited_for(path: Path, leaders: list[Leader]) -> None:
    leaders.append(Leader(path, "frozen"))
    with pytest.raises(JournalError, match="another controller is active"):
        successor(path, lease_s=None, wait_s=2 * LEASE_S)


def test_of_many_that_depose_a_leader_one_leads(path: Path, leaders: list[Leader]) -> None:
    leaders.append(Leader(path, "frozen"))
    terms: list[int] = []
    refused: list[JournalError] = []

    def stand() -> None:
        try:
            with successor(path, wait_s=3 * LEASE_S) as journal:
                terms.append(journal.term)
                until_s = time.monotonic() + PATIENCE_S
                while len(refused) < 3 and time.monotonic() < until_s:
                    journal.require_lead()
                    time.sleep(0.05)
        except JournalError as error:
            refused.append(error)

    threads = [threading.Thread(target=stand) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert (terms, len(refused)) == ([2], 3), refused


def test_a_deposed_leader_in_this_process_is_told(path: Path) -> None:
    first = open_sqlite(path)
    with successor(path):
        time.sleep(BEAT_S)
        with pytest.raises(JournalSuperseded, match="another controller leads"):
            first.require_lead()
    first.close()


def test_a_free_lead_is_left_to_the_promoted_one_though_another_waits(
    path: Path, leaders: list[Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstep.controller.election.succession.PREFERRED_S", PATIENCE_S)
    leaders.append(Leader(path, "beats"))
    succession = FileSuccession(path.parent)
    order: list[str] = []

    def stand(name: str) -> None:
        admitted = partial(succession.admits, name, standby=True)
        election = FileElection(lock_path(path), lease_s=LEASE_S, admitted=admitted)
        with open_sqlite(path, wait_s=None, election=election):
            order.append(name)

    waits, promoted = (threading.Thread(target=stand, args=(name,)) for name in ("waits", "promoted"))
    succession.prefer("promoted")
    waits.start()
    leaders[0].process.kill()
    waits.join(2 * LEASE_S)
    assert order == []
    promoted.start()
    promoted.join(PATIENCE_S)
    assert order == ["promoted"]
    succession.prefer("waits")
    waits.join(PATIENCE_S)
    assert order == ["promoted", "waits"]


def test_a_frozen_leader_is_not_deposed_while_the_failover_is_paused(path: Path, leaders: list[Leader]) -> None:
    leaders.append(Leader(path, "frozen"))
    succession = FileSuccession(path.parent)
    succession.pause("leader", 600)
    election = FileElection(lock_path(path), lease_s=LEASE_S, admitted=partial(succession.admits, "b", standby=True))
    with pytest.raises(JournalError, match="another controller is active"):
        open_sqlite(path, wait_s=2 * LEASE_S, election=election)
    succession.pause("leader", 0)
    with open_sqlite(path, wait_s=PATIENCE_S, election=election) as journal:
        assert journal.term == 2
