"""Checkpoints of torch.distributed.checkpoint in jobs: all go back to one, and a smaller world goes on from one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from midstep.processor.checkpoints import archive
from midstep.protocol.types import InjectionPoint

from ..comparing import assert_same_numbers, finish
from ..jobs import inject
from .conftest import PATIENCE_S, POLICY, WORLD, StartSharded, undisturbed
from .training import Setting

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(500)]


def policy_of(directory: Path) -> dict[str, Any]:
    """Return a policy with checkpoints of torch.distributed.checkpoint every four steps."""
    return {**POLICY, "checkpoint": {"directory": str(directory), "every_steps": 4, "format": "dcp", "keep": 9}}


def test_all_go_back_to_one_and_a_smaller_world_goes_on_from_it(start_sharded: StartSharded, tmp_path: Path) -> None:
    """HSDP on 4 ranks: both holders of a piece are lost, and later one that is about to write. Then FSDP on 2 ranks."""
    setting, policy = Setting(mesh=(2, 2), steps=10), policy_of(tmp_path)
    calm = undisturbed(start_sharded, setting)
    faults = [*(inject(rank, InjectionPoint.FORWARD, 6) for rank in (1, 3)), inject(0, InjectionPoint.CHECKPOINT, 7)]
    job = start_sharded(setting, faults, nodes=1, ranks_per_node=WORLD, policy=policy)
    assert job.wait(PATIENCE_S) == 0, job.said()
    first, second = finish(job)["incidents"]
    assert (first["outcome"], first["restore"], first["resumed_step"]) == ("resumed", "checkpoint", 4), first
    assert (second["outcome"], set(second["replaced"])) == ("resumed", {0}), second
    assert first["healthy_pids_kept"]
    assert second["healthy_pids_kept"]
    assert_same_numbers(job.record(), calm, ranks=WORLD)

    newest = archive.complete_steps(tmp_path)[-1]
    place = tmp_path / f"step-{newest:08d}"
    dcp_to_torch_save(str(place), str(tmp_path / "one.pt"))
    assert set(torch.load(tmp_path / "one.pt", weights_only=False)) >= {"model", "optimizer", "scheduler"}

    smaller = start_sharded(Setting(mesh=(2,), steps=12), nodes=1, ranks_per_node=2, policy=policy)
    assert smaller.wait(PATIENCE_S) == 0, smaller.said()
    assert sorted(smaller.record().steps[0]) == list(range(newest, 12))
