"""Mistakes of the user or the machine are named clearly, and before anything runs where that is possible."""

from pathlib import Path

import pytest

from midstep.processor.checkpoints import archive

from .comparing import assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, ROOMY, Record

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

FILE_LIMIT_BYTES = 40_000  # more than a rank's local state and its records, less than the shard


def test_a_wrong_policy_is_refused_before_anything_starts(start_job: StartJob) -> None:
    """Every mistake is named with file, key and what is allowed; no journal is founded and no process started."""
    job = start_job(policy={"ladder": [{"rung": "recover_in_plaice"}], "deadlines": {"quiesce_s": -1}})
    assert job.wait() != 0
    said = job.output.read_text()
    for expected in ("policy.yaml", "ladder[0].rung", "recover_in_place", "deadlines.quiesce_s"):
        assert expected in said, said
    assert "Traceback" not in said
    assert not job.directory.exists()
    assert not job.processes()


@pytest.mark.soak
def test_a_checkpoint_that_cannot_be_written_does_not_end_the_training(
    start_job: StartJob, undisturbed: Record, tmp_path: Path
) -> None:
    """A directory that cannot be made: every rank says so in its log, and training goes on without checkpoints."""
    (tmp_path / "file").write_text("a file, so nothing can be made below it")
    policy = {**ROOMY, "checkpoint": {"every_steps": 20, "directory": str(tmp_path / "file" / "checkpoints")}}
    job = start_job(policy=policy, **ONE_NODE)
    report = finish(job)
    assert not report["incidents"]
    assert "cannot write" in job.said()
    assert_same_numbers(job.record(), undisturbed)


def test_a_full_disk_leaves_the_last_checkpoint_alone(start_job: StartJob, undisturbed: Record) -> None:
    """A write that fails half-way: nothing that looks complete is left, and training goes on."""
    job = start_job(file_limit_bytes=FILE_LIMIT_BYTES, policy={**ROOMY, "checkpoint": {"every_steps": 20}}, **ONE_NODE)
    report = finish(job)
    assert not report["incidents"]
    assert "no checkpoint of step 20" in job.said()
    assert archive.complete_steps(job.directory / "checkpoints") == ()
    assert_same_numbers(job.record(), undisturbed)
