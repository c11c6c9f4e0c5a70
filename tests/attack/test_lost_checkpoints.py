"""Checkpoints that a job needs to go on"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.files import read_manifest
from midstep.protocol.incidents import JobStatus

from ..chaos.jobs import ROOMY, Job
from .attack import attack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

EVERY, KEEP = 3, 10
FIRST_GATE, SECOND_GATE = 33, 36
RESTARTS: dict[str, Any] = {
    **ROOMY,
    "ladder": [{"rung": "reschedule_pod", "attempts": 2, "budget": {"per_job": 5}}, {"rung": "stop"}],
    "checkpoint": {"every_steps": EVERY, "keep": KEEP},
    "save_before_reschedule": False,  # a rank that is held at a gate takes no order, and would be waited for
}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job that restarts the whole world from a checkpoint, whatever fails."""
    started = Job(tmp_path, nodes=1, ranks_per_node=2, policy=RESTARTS, gates=[FIRST_GATE, SECOND_GATE])
    yield started
    started.close()


def resumed(status: JobStatus) -> bool:
    """Whether the first incident is over."""
    return bool(status.incidents) and status.incidents[0].outcome == "resumed"


@attack(
    "a stray file lies among ten checkpoints, then all of them are damaged, each time before a restart of all ranks",
    holds="training continues from the newest checkpoint; without any the job stops instead of beginning at step 0",
    reads="the reason of the stop: the directory, what was found there, and `store.begin_again`",
)
def test_checkpoints_are_used_while_one_is_left_and_training_never_begins_again(job: Job) -> None:
    """Only the user throws away what has been trained."""
    directory = job.directory / "checkpoints"
    job.held_at(FIRST_GATE)
    assert archive.complete_steps(directory) == tuple(range(EVERY, FIRST_GATE, EVERY))
    (directory / "step-00009999").write_text("not a checkpoint")
    job.rank_process(1).kill()
    job.until(resumed, "the first restart")
    job.open_gate(FIRST_GATE)
    job.held_at(SECOND_GATE)
    for manifest in directory.glob("step-*/manifest.json"):
        manifest.write_text("{}")
    job.rank_process(1).kill()
    assert job.wait() == 1, job.said()
    job.assert_nothing_left()

    report = job.report()
    first, second = report["incidents"]
    assert (first["rung"], first["restore"], first["steps_lost"]) == ("reschedule_pod", "checkpoint", EVERY), first
    assert second["outcome"] == "stopped", second
    for said in (str(directory), "no checkpoint", "is damaged", "checkpoint.begin_again: true"):
        assert said in report["reason"], report["reason"]
    done = [found for steps in job.record().steps.values() for found in steps.items()]
    assert all(len(bits) == 1 for _, bits in done)
    assert max(step for step, _ in done) == SECOND_GATE - 1
    lines = [path.read_text().splitlines() for path in job.records.glob("steps.*")]
    assert all(sum(line.startswith("0 ") for line in each) == 1 for each in lines)


@attack(
    "the newest checkpoint has a rank-local file that cannot be decoded, and a manifest with its right checksum",
    holds="it is marked as damaged, whatever rank it was of, and training continues from the one before",
    reads="in `midstep report`: the file, its step, and what is wrong with it",
)
def test_a_rank_local_file_that_cannot_be_decoded_costs_one_checkpoint(job: Job) -> None:
    """An older one is whole, so the job does not stop."""
    directory = job.directory / "checkpoints"
    job.held_at(FIRST_GATE)
    newest, before = FIRST_GATE - EVERY, FIRST_GATE - 2 * EVERY
    place = directory / f"step-{newest:08d}"
    manifest, garbage = read_manifest(place), b"no state of a rank"
    part = msgspec.structs.replace(
        manifest.parts["own-1.bin"], size_bytes=len(garbage), checksum=xxhash.xxh3_64_hexdigest(garbage)
    )
    forged = msgspec.structs.replace(manifest, parts={**manifest.parts, "own-1.bin": part})
    (place / "own-1.bin").write_bytes(garbage)
    (place / "manifest.json").write_bytes(msgspec.json.encode(forged))
    job.rank_process(1).kill()
    job.until(resumed, "the restart")
    for gate in (FIRST_GATE, SECOND_GATE):
        job.open_gate(gate)
    assert job.wait() == 0, job.said()

    (incident,) = job.report()["incidents"]
    assert (incident["restore"], incident["resumed_step"]) == ("checkpoint", before), incident
    told = "\n".join(f"{each['seen_by']}: {each['kind']}: {each['detail']}" for each in incident["reports"])
    assert f"own-1.bin, of the checkpoint of step {newest}, is damaged" in told, told
