"""torchrun --max-restarts: all processes are ended and started again, and load the last checkpoint directory (DCP)."""

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import torchrun as replicated
from ..kinds import CHECKPOINT_EVERY_STEPS, Setting
from . import mesh

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..workload import Workload

PEER = replicated.PEER


def train(workload: "Workload") -> None:
    """Train from the last checkpoint, if there is one."""
    import torch.distributed as dist

    limit = timedelta(seconds=replicated.GROUP_TIMEOUT_S) if workload.setting is Setting.TUNED else None
    dist.init_process_group("gloo", timeout=limit)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = mesh.shard(workload.network(), mesh.rows_and_columns(limit))
    optimizer = workload.optimizer(model)
    checkpoints = Checkpoints(workload.directory / "checkpoints", model, optimizer)
    for step in range(checkpoints.load(), workload.total_steps):
        mesh.step(workload, model, optimizer, step, rank)
        workload.stepped(step, world)
        if (step + 1) % CHECKPOINT_EVERY_STEPS == 0:
            checkpoints.save(step + 1, rank)
    mesh.finished(workload, model)
    dist.destroy_process_group()


class Checkpoints:
    """The directories that `torch.distributed.checkpoint` writes with all ranks: each is complete or not there."""

    def __init__(self, place: Path, model: "nn.Module", optimizer: "torch.optim.Optimizer") -> None:
        self._place, self._model, self._optimizer = place, model, optimizer

    def load(self) -> int:
        """Load what was saved last, if anything was; return the step to go on with."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        steps = [int(path.name) for path in self._place.glob("*") if path.name.isdecimal()]
        if not steps:
            return 0
        state = self._state()
        load(state, checkpoint_id=os.fspath(self._place / str(max(steps))))
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return max(steps)

    def save(self, step: int, rank: int) -> None:
        """Save, and have rank 0 publish it."""
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import save

        draft = self._place / f"{step}.new"
        save(self._state(), checkpoint_id=os.fspath(draft))
        if rank == 0:
            draft.rename(self._place / str(step))
        dist.barrier()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}
