"""DLRover: as torchrun, but each step's state is copied into shared memory, from which restarted processes load it.

Its master is started by hand: `dlrover-run --standalone` of 0.6.1 fails with torch 2.13.
"""

import copy
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from .kinds import CHECKPOINT_EVERY_STEPS, Fault, Setting
from .plan import HOST, OWN_STORE, Peer, Plan, Program, Start, free_port
from .torchrun import GROUP_TIMEOUT_S, HANG, MAX_RESTARTS

if TYPE_CHECKING:
    from .workload import Workload

REQUIREMENTS = (("dlrover==0.6.1", "kubernetes", "tornado"),)  # the last two are imported by its master
QUICK = ("--monitor-interval", "0.05")


def _plan(start: Start) -> Plan:
    port, job, nodes = free_port(), f"peers-{uuid.uuid4().hex[:8]}", start.trial.nodes
    address = f"{HOST}:{port}"
    master = ["-m", "dlrover.python.master.main", "--platform", "local", "--port", str(port), "--node_num", str(nodes)]
    size = ["--nnodes", str(nodes), "--nproc_per_node", str(start.trial.ranks // nodes)]
    launcher = [start.program("dlrover-run"), *size, "--max_restarts", start.restarts(MAX_RESTARTS)]
    command = [*launcher, *(QUICK if start.tuned else ()), *start.script()]
    shared = {**OWN_STORE, "DLROVER_MASTER_ADDR": address, "NODE_NUM": str(nodes)}
    # Its sockets and memory go by job and place on the node: nodes that share a machine have a name each.
    names = [{"ELASTIC_JOB_NAME": f"{job}-{node}", "NODE_RANK": str(node)} for node in range(nodes)]
    return Plan(
        [start.on_node(node, command, {**shared, **name}) for node, name in enumerate(names)],
        servers=[Program([start.program("python"), *master, "--job_name", job], {**shared, **names[0]}, port)],
    )


PEER = Peer(
    "DLRover flash checkpoint",
    REQUIREMENTS,
    _plan,
    {(Setting.DEFAULT, Fault.STOP): HANG, (Setting.DEFAULT, Fault.SLEEP): HANG},
)


def train(workload: "Workload") -> None:
    """Train from what is in memory or on disk; save to memory in each step, to disk in every tenth."""
    import torch.distributed as dist
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
    from torch.nn.parallel import DistributedDataParallel

    limit = timedelta(seconds=GROUP_TIMEOUT_S) if workload.setting is Setting.TUNED else None
    dist.init_process_group("gloo", timeout=limit)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.network())
    optimizer = workload.optimizer(model)
    checkpointer = DdpCheckpointer(str(workload.directory / "checkpoints"))
    # On a CPU what is loaded are views of the shared memory: without a copy all ranks would update the same tensors.
    saved, first = copy.deepcopy(checkpointer.load_checkpoint()), 0
    if saved:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, workload.total_steps):
        optimizer.zero_grad()
        loss = model(*workload.batch(step, rank))
        workload.fault_point(step, rank)
        loss.backward()
        optimizer.step()
        workload.stepped(step, world)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        to_disk = (step + 1) % CHECKPOINT_EVERY_STEPS == 0
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK if to_disk else StorageType.MEMORY)
    workload.finished(model.module.parameters())
    dist.destroy_process_group()
