"""A launcher is killed, with all that it had started: `midstep resume` continues the job, bit for bit."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from midstep.protocol.types import InjectionPoint

from .comparing import assert_same_numbers
from .conftest import StartJob
from .jobs import PATIENCE_S, Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240), pytest.mark.soak]

GATE = 25  # between two checkpoints
NEWEST = 20


def resume(directory: Path) -> subprocess.CompletedProcess[str]:
    """Type the command."""
    return subprocess.run(
        [sys.executable, "-m", "midstep.cli.main", "resume", "--quiet", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def lose(job: Job) -> None:
    """Kill the launcher when the ranks are at the gate, and wait until nothing of the job is left."""
    job.held_at(GATE)
    job.launcher.kill()
    job.launcher.wait(PATIENCE_S)
    psutil.wait_procs(job.processes(), PATIENCE_S)
    job.open_gate(GATE)


@pytest.mark.parametrize("options", [(), ("--fixed-nodes",)], ids=["nodes are made", "fixed nodes"])
def test_a_job_whose_launcher_was_killed_continues_from_its_checkpoint_with_its_budgets(
    start_job: StartJob, undisturbed: Record, options: tuple[str, ...]
) -> None:
    faults = [inject(1, InjectionPoint.FORWARD, 6)]
    job = start_job(gates=(GATE,), options=options, faults=faults)
    lose(job)
    done = resume(job.directory)
    assert done.returncode == 0, done.stderr + job.said()
    report = job.report()
    first, second = report["incidents"]
    assert (first["rung"], second["outcome"], second["resumed_step"]) == ("recover_in_place", "resumed", NEWEST)
    assert second["restore"] == "checkpoint"
    used = {budget["name"]: budget["used"] for budget in report["budgets"]}
    assert used["recover_in_place per job"] == 1, "the death of rank 1 before is still counted"
    assert_same_numbers(job.record(), undisturbed)
    again = resume(job.directory)
    assert again.returncode == 1
    assert "has ended: all ranks have finished. Start a new job with `midstep run`" in again.stderr


def test_a_job_that_runs_is_not_started_twice(start_job: StartJob) -> None:
    job = start_job(gates=(GATE,))
    job.held_at(GATE)
    refused = resume(job.directory)
    assert refused.returncode == 1
    assert "is running on this machine, or is just ending: see `midstep status" in refused.stderr, refused.stderr
    assert job.launcher.poll() is None
