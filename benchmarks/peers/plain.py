"""Plain DDP under torchrun, without checkpoints: what a step costs when nothing is prepared for a fault."""

from typing import TYPE_CHECKING

from .kinds import Fault, Setting
from .plan import OWN_STORE, Peer, Plan, Program, Start

if TYPE_CHECKING:
    from .workload import Workload


def _plan(start: Start) -> Plan:
    return Plan([Program(start.torchrun(), OWN_STORE)])


PEER = Peer(
    "plain DDP",
    (),
    _plan,
    {
        **{(Setting.DEFAULT, fault): "nothing is prepared for a fault" for fault in Fault if fault is not Fault.NONE},
        **{(Setting.TUNED, fault): "there is nothing to tune" for fault in Fault},
    },
)


def train(workload: "Workload") -> None:
    """Train from the first step to the last."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.network())
    optimizer = workload.optimizer(model)
    for step in range(workload.total_steps):
        optimizer.zero_grad()
        loss = model(*workload.batch(step, rank))
        loss.backward()
        optimizer.step()
        workload.stepped(step, world)
    workload.finished(model.parameters())
    dist.destroy_process_group()
