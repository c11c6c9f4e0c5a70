"""Plain HSDP under torchrun, without checkpoints: what a step costs when nothing is prepared for a fault."""

from typing import TYPE_CHECKING

from .. import plain as replicated
from . import mesh

if TYPE_CHECKING:
    from ..workload import Workload

PEER = replicated.PEER._replace(title="plain HSDP")


def train(workload: "Workload") -> None:
    """Train from the first step to the last."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = mesh.shard(workload.network(), mesh.rows_and_columns())
    optimizer = workload.optimizer(model)
    for step in range(workload.total_steps):
        mesh.step(workload, model, optimizer, step, rank)
        workload.stepped(step, world)
    mesh.finished(workload, model)
    dist.destroy_process_group()
