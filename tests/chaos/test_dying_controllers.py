"""A real training under controllers that are killed around every record that they write while it recovers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.controller.journal.reading import read_status
from midstep.protocol.incidents import Outcome

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, PATIENCE_S, Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(400)]

DYING = Path(__file__).with_name("dying")
HIT, GATE = 1, 20
STANDING_BY = 2  # beside the launcher's: one leads as soon as another has died
LEAST_TERMS, MOST = 3, 150  # what comes at the same time is one record
_POLL_S = 0.1


class Controllers:
    """Controllers of a job that are started beside its launcher, as on other machines; one for each that has died."""

    def __init__(self, job: Job) -> None:
        self._command = [sys.executable, "-m", "midstep.cli.main", "controller", "--standby"]
        self._command += ["--job-dir", str(job.directory), "--run-dir", str(job.run_directory)]
        self._job = job
        self._log = (job.directory / "logs" / "controller.log").open("ab")
        self._living: list[subprocess.Popen[bytes]] = []
        self.died = 0

    def keep(self) -> None:
        """Start as many as have died."""
        dead = [each for each in self._living if each.poll() is not None]
        self.died += len(dead)
        assert self.died < MOST, self._job.said()
        self._living = [each for each in self._living if each not in dead]
        while len(self._living) < STANDING_BY:
            self._living.append(subprocess.Popen(self._command, stdout=self._log, stderr=self._log))

    def close(self) -> None:
        """End them all."""
        for each in self._living:
            each.kill()
            each.wait()
        self._log.close()


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file: while it is there, all controllers die."""
    file = tmp_path / "dying"
    monkeypatch.setenv("PYTHONPATH", str(DYING))
    monkeypatch.setenv("TEST_DYING_FILE", str(file))
    monkeypatch.setenv("TEST_DYING_WHEN", request.param)
    yield file
    file.unlink(missing_ok=True)


@pytest.mark.parametrize("dying", ["before", "after"], indirect=True)
def test_a_recovery_is_finished_by_controllers_that_are_killed_at_every_record(
    dying: Path, start_job: StartJob, undisturbed: Record
) -> None:
    """It is one incident, at the cost of one; nobody else is replaced, and no bit differs."""
    job = start_job(gates=[GATE], **ONE_NODE)
    status = job.held_at(GATE)
    controllers = Controllers(job)
    try:
        controllers.keep()
        dying.touch()
        os.kill(status.ranks[HIT].pid, signal.SIGKILL)
        job.open_gate(GATE)
        deadline = time.monotonic() + PATIENCE_S
        while [each.outcome for each in read_status(job.directory).incidents] != [Outcome.RESUMED]:
            assert time.monotonic() < deadline, job.said()
            controllers.keep()
            time.sleep(_POLL_S)
        dying.unlink()
        assert read_status(job.directory).term >= LEAST_TERMS
        report = finish(job)
    finally:
        controllers.close()
    (incident,) = report["incidents"]
    assert_nobody_harmed(incident, {HIT})
    assert {use["name"]: use["used"] for use in report["budgets"]}["recover_in_place per job"] == 1
    assert status.ranks[0].pid == incident["pids_after"]["0"]
    assert_same_numbers(job.record(), undisturbed)
