"""The user ends a job, or the launcher is killed: nothing is left behind."""

import os
import signal
import time

import psutil
import pytest

from midstep.processor.checkpoints import archive
from midstep.protocol.types import FaultAction, InjectionPoint

from .comparing import assert_same_steps
from .conftest import StartJob
from .jobs import ONE_NODE, Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

BETWEEN_S = 0.1  # two signals at once would be one
HELD = [inject(1, InjectionPoint.FORWARD, 6), inject(1, InjectionPoint.JOIN, None, life=2, action=FaultAction.STOP)]


def interrupt(job: Job) -> None:
    """Do what Ctrl-C at a terminal does: SIGINT to the whole foreground group."""
    os.killpg(job.launcher.pid, signal.SIGINT)


def test_ctrl_c_stops_the_job_with_a_checkpoint(start_job: StartJob, undisturbed: Record) -> None:
    """Exit code 130, an emergency checkpoint, and nothing left behind."""
    job = start_job(steps=10_000, **ONE_NODE)
    job.until(lambda status: status.phase == "running" and status.committed >= 5, "some steps")
    interrupt(job)
    assert job.wait() == 130, job.said()
    job.assert_nothing_left()
    report = job.report()
    assert report["exit_code"] == 130
    assert "an emergency checkpoint of step" in report["reason"]
    assert f"of step {archive.complete_steps(job.directory / 'checkpoints')[-1]} is at" in report["reason"]
    early = {rank: {i: seen for i, seen in steps.items() if i < 60} for rank, steps in job.record().steps.items()}
    assert_same_steps(Record(early, {}), undisturbed)


def test_ctrl_c_in_a_recovery_stops_the_job(start_job: StartJob) -> None:
    """With a newcomer that does not move, too, the survivors save what they hold, and nothing is left behind."""
    job = start_job(faults=HELD, **ONE_NODE)
    status = job.until(lambda status: status.phase == "quiescing" and status.ranks[1].pid != 0, "the newcomer")
    assert psutil.pid_exists(status.ranks[1].pid)
    interrupt(job)
    assert job.wait() == 130, job.said()
    job.assert_nothing_left()
    assert archive.complete_steps(job.directory / "checkpoints") == (6,)


def test_ctrl_c_before_training_has_begun_ends_everything(start_job: StartJob) -> None:
    """While processes are on their way up there is nothing to save, and nothing left behind."""
    job = start_job()
    job.until(lambda status: status.phase in {"waiting", "starting"}, "the start")
    interrupt(job)
    assert job.wait() == 130, job.said()
    job.assert_nothing_left()


@pytest.mark.soak
def test_ctrl_c_twice_does_not_wait_for_anybody(start_job: StartJob) -> None:
    """The second one ends everything at once."""
    job = start_job(steps=10_000, **ONE_NODE)
    job.until(lambda status: status.phase == "running" and status.committed >= 5, "some steps")
    interrupt(job)
    time.sleep(BETWEEN_S)
    interrupt(job)
    assert job.wait() == 130, job.said()
    job.assert_nothing_left()


def test_a_killed_launcher_takes_everything_along(start_job: StartJob) -> None:
    """After kill -9 of the launcher every process ends by itself, and nothing is left behind."""
    job = start_job(steps=10_000, nodes=2, ranks_per_node=1)
    job.until(lambda status: status.phase == "running" and status.committed >= 5, "some steps")
    job.launcher.kill()
    assert job.wait() == -signal.SIGKILL
    job.assert_nothing_left()
