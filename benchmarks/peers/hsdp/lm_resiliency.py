"""lm-resiliency: copies of each rank's pieces in host memory, and on disk; all ranks are started again by torchrun.

Its detector of hangs and wrong numbers asks for NCCL, and is off.
"""

from datetime import timedelta
from typing import TYPE_CHECKING

from .. import torchrun as replicated
from ..kinds import COLUMNS, Setting
from . import mesh

if TYPE_CHECKING:
    from ..workload import Workload

REQUIREMENTS = (("--no-deps", "lm-resiliency==0.2.0"),)
PEER = replicated.PEER._replace(title="lm-resiliency", requirements=REQUIREMENTS)
INTERVAL_STEPS = 10  # its default


def train(workload: "Workload") -> None:
    """Train from the newest copies that all ranks have."""
    import torch
    import torch.distributed as dist
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency

    tuned = workload.setting is Setting.TUNED
    limit = timedelta(seconds=replicated.GROUP_TIMEOUT_S) if tuned else None
    dist.init_process_group("gloo", timeout=limit)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = mesh.shard(workload.network(), mesh.rows_and_columns(limit))
    optimizer = workload.optimizer(model)
    folder = str(workload.directory / "copies")
    copies = InMemoryCkptConfig(disk_folder=folder, replication_jump=COLUMNS, pin_memory=False)
    handle = enable_resiliency(
        model,
        optimizer,
        interval=1 if tuned else INTERVAL_STEPS,
        enable_detection=False,
        checkpoint=copies,
        device=torch.device("cpu"),
    )
    for step in range(handle.step_count, workload.total_steps):
        mesh.step(workload, model, optimizer, step, rank)
        workload.stepped(step, world)
    mesh.finished(workload, model)
    handle.close()
    dist.destroy_process_group()
