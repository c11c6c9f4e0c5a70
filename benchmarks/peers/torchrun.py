"""torchrun --max-restarts: all processes are ended and started again, and load the last checkpoint."""

from datetime import timedelta
from typing import TYPE_CHECKING

from .kinds import Fault, Setting
from .plan import OWN_STORE, Peer, Plan, Start

if TYPE_CHECKING:
    from .workload import Workload

MAX_RESTARTS = 3
QUICK = ("--monitor-interval", "0.05", "--shutdown-timeout", "1")
GROUP_TIMEOUT_S = 5.0
HANG = "gloo waits 30 minutes before it gives up"


def _plan(start: Start) -> Plan:
    flags = ["--max-restarts", start.restarts(MAX_RESTARTS), *(QUICK if start.tuned else ())]
    launcher = [start.program("python"), "-m", "torch.distributed.run"]
    return start.elastic(launcher, flags, OWN_STORE, quick=start.tuned)


PEER = Peer(
    "torchrun --max-restarts",
    (),
    _plan,
    {(Setting.DEFAULT, Fault.STOP): HANG, (Setting.DEFAULT, Fault.SLEEP): HANG},
)


def train(workload: "Workload") -> None:
    """Train from the last checkpoint, if there is one."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from .workload import CheckpointFile

    limit = timedelta(seconds=GROUP_TIMEOUT_S) if workload.setting is Setting.TUNED else None
    dist.init_process_group("gloo", timeout=limit)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.network())
    optimizer = workload.optimizer(model)
    file = CheckpointFile(workload.directory)
    for step in range(file.load(model.module, optimizer), workload.total_steps):
        optimizer.zero_grad()
        loss = model(*workload.batch(step, rank))
        workload.fault_point(step, rank)
        loss.backward()
        optimizer.step()
        workload.stepped(step, world)
        file.save_when_due(model.module, optimizer, step, rank)
    workload.finished(model.module.parameters())
    dist.destroy_process_group()
