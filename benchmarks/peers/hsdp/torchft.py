"""torchft: a row is a replica group under a torchrun of its own, which restarts both ranks of it when one is lost.

Gradients are averaged over the rows by FSDP2's all-reduce hook in a group that torchft's manager rebuilds, as
torchtitan's integration of torchft does.
"""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from .. import torchft as replicated
from ..kinds import COLUMNS, Setting
from ..plan import OWN_STORE, Peer, Plan, Start
from . import mesh

if TYPE_CHECKING:
    import torch

    from ..workload import Workload


def _plan(start: Start) -> Plan:
    return replicated.launched(start, ranks_of_a_group=COLUMNS, store=OWN_STORE)


PEER = Peer("torchft nightly", replicated.REQUIREMENTS, _plan)


def train(workload: "Workload") -> None:
    """Train until all steps are committed; each step asks for a quorum, and is repeated when it fails."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torchft.process_group import ManagedProcessGroup

    group = int(os.environ["REPLICA_GROUP_ID"])
    tuned = workload.setting is Setting.TUNED
    limit = timedelta(seconds=replicated.GLOO_S)
    dist.init_process_group("gloo", timeout=limit if tuned else None)
    place = group * COLUMNS + dist.get_rank()
    model = mesh.shard(workload.network(), init_device_mesh("cpu", (COLUMNS,), mesh_dim_names=("shard",)))
    optimizer = workload.optimizer(model)
    manager = replicated.manager_of(workload, model, optimizer, replicated.GLOO_S)
    rows = ManagedProcessGroup(manager)
    rows.register("rows")

    def average(output: "torch.Tensor") -> None:
        dist.all_reduce(output, op=dist.ReduceOp.AVG, group=rows)

    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(average)
    replicated.loop(workload, manager, model, optimizer, place, COLUMNS)
    mesh.finished(workload, model)
    manager.shutdown(wait=False)
    dist.destroy_process_group()
