"""DLRover Unified, "PrimeMaster Failover": save, load, and going on.

In its document a master that comes back goes on only if it was RUNNING, and stops the job otherwise. Here every event
is in the journal before anything follows from it, so a controller goes on in whatever phase the job was.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.journal.upkeep import JournalTrouble
from midstep.controller.journaled import decided
from midstep.controller.recovery.events import DeadlinePassed
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import default_policy
from midstep.protocol.errors import JournalError
from midstep.protocol.messages import CheckpointSaved, Quiesce, Rejoin, Release, Resume, SaveCheckpoint
from midstep.protocol.types import FaultKind
from midstep.testing.answering_cluster import AnsweringCluster


def waiting() -> AnsweringCluster:
    """A job whose nodes have not come."""
    job = AnsweringCluster()
    job.node_joins("node0")
    return job


def starting() -> AnsweringCluster:
    """A job of whose ranks one has not joined."""
    job = AnsweringCluster(never_joins={3})
    for number in range(3):
        job.node_joins(f"node{number}")
    job.settle()
    job.never_joins.clear()
    return job


def suspecting() -> AnsweringCluster:
    """A collective failed, and it is not known whose fault it is."""
    job = AnsweringCluster().start()
    job.suffer(FaultKind.COMMUNICATION, 2)
    return job


def held_at(*commands: type) -> Callable[[], AnsweringCluster]:
    """A job that lost rank 1, and in which nobody has answered these commands."""

    def made() -> AnsweringCluster:
        job = AnsweringCluster().start()
        job.mute = lambda body: isinstance(body, commands)
        job.kill(1)
        job.mute = lambda body: False
        return job

    return made


def finishing() -> AnsweringCluster:
    """All ranks have been released, and none has left."""
    job = AnsweringCluster().start()
    job.mute = lambda body: isinstance(body, Release)
    job.complete()
    job.mute = lambda body: False
    return job


def saving() -> AnsweringCluster:
    """A stop whose emergency checkpoint is under way."""
    job = AnsweringCluster().start()
    job.mute = lambda body: isinstance(body, SaveCheckpoint)
    job.stop()
    job.mute = lambda body: False
    return job


PHASES: dict[Phase, Callable[[], AnsweringCluster]] = {
    Phase.WAITING: waiting,
    Phase.STARTING: starting,
    Phase.RUNNING: lambda: AnsweringCluster().start(),
    Phase.SUSPECTING: suspecting,
    Phase.QUIESCING: held_at(Quiesce),
    Phase.REJOINING: held_at(Rejoin),
    Phase.RESUMING: held_at(Resume),
    Phase.FINISHING: finishing,
    Phase.SAVING: saving,
}


def test_manager_save_load(tmp_path: Path) -> None:
    """What a running job was founded with, and where it stood, is what the next controller reads from the disk."""
    job = AnsweringCluster().start()
    job.kill(1)
    path = journal_path(tmp_path)
    found_journal(path, job.job, default_policy())
    with open_sqlite(path) as journal:
        for number, (event, at_s) in enumerate(job.journal, start=1):
            journal.append([JournalEntry(event, "controller", 1, number)], at_s)

    with open_sqlite(path) as journal:
        loaded = journal.founding.machine()
        for recorded, at_s in journal.replay():
            decided(loaded, recorded, at_s)

    assert loaded.phase is Phase.RUNNING
    assert loaded.status(job.now) == job.machine.status(job.now)


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_manager_failover_goes_on_in_every_phase(phase: Phase) -> None:
    """DLRover's does in RUNNING only, else its job stops. Here the job comes to the end that it would have had."""
    job = PHASES[phase]()
    assert job.phase is phase
    stops = phase is Phase.SAVING

    job.restart_controller()
    assert job.phase is phase
    job.settle()
    if phase is Phase.WAITING:
        job.node_joins("node1")
        job.node_joins("node2")
        job.settle()
    while job.finish is None and job.phase not in (Phase.RUNNING, Phase.ENDED):
        job.wait()
    if job.phase is Phase.RUNNING:
        job.complete()

    assert job.outcome.exit_code == (130 if stops else 0)
    assert job.machine.state.accounts.restarts == 0


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_manager_failover_keeps_every_healthy_worker(phase: Phase) -> None:
    """No process ends because a controller did."""
    job = PHASES[phase]()
    before = job.pids_now()

    job.restart_controller()
    job.settle()

    if phase is not Phase.FINISHING and phase is not Phase.SAVING:
        assert {rank: job.pids_now()[rank] for rank in before} == before


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_state_is_saved_on_any_change(phase: Phase) -> None:
    """Not at chosen moments only: after every single event the next controller would stand where this one stands."""
    job = PHASES[phase]()
    replayed = RecoveryMachine(default_policy(), job.job)
    live = RecoveryMachine(default_policy(), job.job)

    for cut in range(1, len(job.journal) + 1):
        event, at_s = job.journal[cut - 1]
        live.handle(event, at_s)
        if cut % 7 == 0 or cut == len(job.journal):
            replayed = RecoveryMachine(default_policy(), job.job)
            for again, again_s in job.journal[:cut]:
                replayed.handle(again, again_s)
            assert replayed.status(at_s) == live.status(at_s)


def test_deadlines_that_passed_while_there_was_no_controller_start_anew() -> None:
    """Nobody could have answered in that time, so nobody is blamed for it."""
    job = held_at(Quiesce)()
    job.now += 3600

    job.restart_controller()
    due_s = job.machine.next_deadline()
    job.feed(DeadlinePassed())
    job.settle()

    assert due_s is not None
    assert due_s > job.now
    assert job.phase is Phase.RUNNING
    assert len(job.incidents[-1].decisions) == 1


def test_ended_job_stays_ended() -> None:
    """A controller that starts after the end says the same end again, and starts nothing."""
    job = AnsweringCluster().start()
    job.complete()
    first = job.outcome

    job.restart_controller()
    job.settle()

    assert job.outcome == first
    assert job.processes == {}


def test_failing_save_is_reported_and_not_raised() -> None:
    """A journal that cannot be written is told of and tried again; only after long does the controller give up."""
    trouble = JournalTrouble(patience_s=600.0)
    error = JournalError("disk full")

    trouble.suffer(error, 0.0, waiting=3)

    assert trouble.error is error
    assert trouble.blocks(0.1)
    assert not trouble.blocks(trouble.retry_s)
    trouble.end(5.0)
    assert trouble.error is None
    trouble.suffer(error, 10.0, waiting=3)
    with pytest.raises(JournalError):
        trouble.suffer(error, 10.0 + 601.0, waiting=3)


@pytest.mark.parametrize("content", [b"", b"not a journal at all, but long enough to be one" * 100])
def test_failing_load_is_an_error_and_never_a_fresh_start(tmp_path: Path, content: bytes) -> None:
    """DLRover's goes on with an empty state then, and so ends or restarts a job that was well."""
    path = journal_path(tmp_path)
    path.write_bytes(content)

    with pytest.raises(JournalError, match="journal"):
        open_sqlite(path)


def test_request_stop_in_ready_stops_directly() -> None:
    """Before any rank has trained there is nothing to save, and nobody to wait for."""
    for job in (waiting(), starting()):
        job.stop("not today")

        assert job.outcome.exit_code == 130
        assert job.outcome.reason == "not today"
        assert job.commands(SaveCheckpoint) == []


def test_request_stop_while_recovering_ends_the_job() -> None:
    """The survivors save what they hold; the newcomer that is on its way is not waited for."""
    job = held_at(Quiesce)()

    job.stop("enough")
    job.settle()

    assert job.outcome.exit_code == 130
    assert "an emergency checkpoint of step 6 is at" in job.outcome.reason


def test_exception_in_the_last_save_leads_to_a_safe_stop() -> None:
    """The job ends with its own reason, and with what became of the checkpoint."""
    job = AnsweringCluster().start()
    job.mute = lambda body: isinstance(body, SaveCheckpoint)
    job.stop("enough")

    job.feed(CheckpointSaved(1, job.machine.generation, 6, "", "disk full"))

    assert job.outcome.reason == "enough; the emergency checkpoint failed: disk full"
