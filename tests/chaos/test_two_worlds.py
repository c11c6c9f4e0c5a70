"""Two worlds, one checkpoint directory: the one that began last has it, and the other does no harm."""

import json
from pathlib import Path

import pytest

from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.files import MARK

from .comparing import assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, ROOMY, STEPS, Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(180)]

HELD_AT = 25  # behind the checkpoint of step 20


def marked_by(directory: Path) -> str:
    """Return the job whose world has the directory."""
    return str(json.loads((directory / MARK).read_text())["job"])


def times(directory: Path) -> dict[Path, int]:
    """Return when each file of a directory was written last."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def said_by_ranks(job: Job) -> str:
    """Return what the processes of a job have logged."""
    return "".join(path.read_text() for path in sorted((job.directory / "logs").glob("rank-*.log")))


def test_a_world_that_trains_on_beside_its_successor_writes_no_checkpoint_any_more(
    start_job: StartJob, undisturbed: Record, tmp_path: Path
) -> None:
    """As after a network that was cut: the first goes on, unheard, while the second has begun from its checkpoint."""
    shared = tmp_path / "checkpoints"
    policy = {**ROOMY, "checkpoint": {"directory": str(shared), "every_steps": 10}}
    first = start_job(policy=policy, gates=[HELD_AT], **ONE_NODE)
    first.held_at(HELD_AT)
    assert marked_by(shared) == first.name
    assert archive.complete_steps(shared) == (10, 20)

    second = start_job(policy=policy, **ONE_NODE)
    assert not finish(second)["incidents"], second.said()
    assert marked_by(shared) == second.name
    assert {min(steps) for steps in second.record().steps.values()} == {20}
    written = times(shared)

    first.open_gate(HELD_AT)
    assert not finish(first)["incidents"], first.said()
    assert times(shared) == written
    assert f"of job {second.name} (process " in said_by_ranks(first)
    for job in (first, second):
        assert_same_numbers(job.record(), undisturbed)
    assert archive.complete_steps(shared)[-1] == STEPS
