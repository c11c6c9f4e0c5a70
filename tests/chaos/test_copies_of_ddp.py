"""Data parallel training whose replicas have all died at once: copies in host memory bring it back, not the disk."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from midstep.processor.checkpoints import archive
from midstep.protocol.types import FaultAction, InjectionPoint

from .comparing import assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, PATIENCE_S, RANKS, ROOMY, STEPS, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(300)]

KILLED_AT = 35
EVERY = 10
POLICY: dict[str, Any] = {
    **ROOMY,
    "restore": ["replica", "host_copy", "checkpoint"],
    "host_copy": {"every_steps": 1},
    "checkpoint": {"every_steps": EVERY, "format": "dcp", "keep": 9},
}


def test_all_replicas_come_back_from_memory(start_job: StartJob, undisturbed: Record) -> None:
    """At most one step is repeated; checkpoints are torch's meanwhile, and torch reads what a rank had."""
    faults = [
        inject(rank, point, KILLED_AT)
        for rank in range(RANKS)
        for point in (InjectionPoint.FORWARD, InjectionPoint.STOP)
    ]
    job = start_job(policy=POLICY, faults=faults, **ONE_NODE)
    (incident,) = finish(job)["incidents"]
    assert (incident["outcome"], incident["restore"]) == ("resumed", "host_copy"), incident
    assert set(incident["replaced"]) == set(range(RANKS))
    assert incident["steps_lost"] <= 1
    assert_same_numbers(job.record(), undisturbed)

    directory = job.directory / "checkpoints"
    newest = archive.complete_steps(directory)[-1]
    assert newest % EVERY == 0
    rate = {"optimizer": {"param_groups": [{"lr": 0.0}]}}
    load(rate, checkpoint_id=str(directory / f"step-{newest:08d}"))
    assert rate["optimizer"]["param_groups"][0]["lr"] > 0.0, torch.__version__


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_checkpoints_are_written_from_copies_though_ranks_die(
    start_job: StartJob, undisturbed: Record, form: str
) -> None:
    """All ranks are killed two steps after the copy of one; it is there in the end, and so is the last one."""
    faults = [inject(rank, InjectionPoint.FORWARD, 2 * EVERY + 1) for rank in range(RANKS)]
    policy = {**POLICY, "checkpoint": {"every_steps": EVERY, "format": form, "keep": 9, "asynchronous": True}}
    gate = 2 * EVERY - 1  # no copy is taken while the one before it is still being written
    job = start_job(policy=policy, faults=faults, gates=[gate], **ONE_NODE)
    job.held_at(gate)
    deadline = time.monotonic() + PATIENCE_S
    while archive.complete_steps(job.directory / "checkpoints") != (EVERY,):
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.05)
    job.open_gate(gate)
    (incident,) = finish(job)["incidents"]
    assert (incident["outcome"], incident["restore"]) == ("resumed", "host_copy"), incident
    assert_same_numbers(job.record(), undisturbed)
    steps = archive.complete_steps(job.directory / "checkpoints")
    assert {2 * EVERY, STEPS} <= set(steps), (steps, job.said())
    assert not list((job.directory / "checkpoints").glob("*.tmp-*"))


def test_a_node_that_dies_while_a_checkpoint_is_written_costs_that_one_at_most(
    start_job: StartJob, undisturbed: Record
) -> None:
    """What has a name is whole, and the last one is there."""
    faults = [inject(2, InjectionPoint.FORWARD, 2 * EVERY + 1, action=FaultAction.KILL_NODE)]
    policy = {**POLICY, "checkpoint": {"every_steps": EVERY, "keep": 9, "asynchronous": True}}
    policy |= {"host_copy": {"every_steps": 1, "copies": 2}, "deadlines": {**ROOMY["deadlines"], "save_s": 10.0}}
    job = start_job(policy=policy, faults=faults, spares=1)
    (incident,) = finish(job)["incidents"]
    assert incident["outcome"] == "resumed", incident
    assert_same_numbers(job.record(), undisturbed)
    directory = job.directory / "checkpoints"
    steps = archive.complete_steps(directory)
    assert {path.name for path in directory.glob("step-*") if "." not in path.name} == {f"step-{n:08d}" for n in steps}
    assert steps[-1] == STEPS, job.said()


def test_a_job_starts_from_what_plain_torch_has_saved(start_job: StartJob, tmp_path: Path) -> None:
    """The state of an earlier job, saved again without anything of midstep's: steps are counted on from there."""
    shorter = {**POLICY, "host_copy": {"every_steps": 30}}
    first = start_job(policy=shorter, **ONE_NODE)
    finish(first)
    newest = archive.complete_steps(first.directory / "checkpoints")[0]
    dcp_to_torch_save(str(first.directory / "checkpoints" / f"step-{newest:08d}"), str(tmp_path / "one.pt"))
    state = torch.load(tmp_path / "one.pt", weights_only=False)
    del state["midstep"]
    save(state, checkpoint_id=str(tmp_path / "foreign" / f"step-{newest:08d}"))

    policy = {**shorter, "checkpoint": {**POLICY["checkpoint"], "directory": str(tmp_path / "foreign")}}
    second = start_job(policy=policy, **ONE_NODE)
    finish(second)
    assert min(second.record().steps[0]) == newest, second.said()
    assert archive.complete_steps(tmp_path / "foreign")[-1] > newest
