"""NVRx ft_launcher: as torchrun, with a monitor beside each rank that ends it when its heartbeats stay away."""

from datetime import timedelta
from typing import TYPE_CHECKING

from .inprocess import REQUIREMENTS
from .kinds import Fault, Setting
from .plan import OWN_STORE, Peer, Plan, Start
from .torchrun import GROUP_TIMEOUT_S, MAX_RESTARTS

if TYPE_CHECKING:
    from .workload import Workload

TUNED = (
    *("--monitor-interval", "0.05", "--ft-workload-check-interval", "0.5", "--ft-rank-heartbeat-timeout", "4"),
    *("--ft-initial-rank-heartbeat-timeout", "60"),
)
HANG = "a heartbeat may stay away for 45 minutes"


def _plan(start: Start) -> Plan:
    restarts = ["--max-restarts", start.restarts(MAX_RESTARTS)]
    flags = [*restarts, *(TUNED if start.tuned else ("--ignore-missing-fault-tol-cfg",))]
    return start.elastic([start.program("ft_launcher")], flags, OWN_STORE, quick=start.tuned)


PEER = Peer(
    "NVRx ft_launcher",
    REQUIREMENTS,
    _plan,
    {(Setting.DEFAULT, Fault.STOP): HANG, (Setting.DEFAULT, Fault.SLEEP): HANG},
)


def train(workload: "Workload") -> None:
    """Train from the last checkpoint, and send a heartbeat in each step."""
    import torch.distributed as dist
    from nvidia_resiliency_ext import fault_tolerance
    from torch.nn.parallel import DistributedDataParallel

    from .workload import CheckpointFile

    monitor = fault_tolerance.RankMonitorClient()
    monitor.init_workload_monitoring()
    limit = timedelta(seconds=GROUP_TIMEOUT_S) if workload.setting is Setting.TUNED else None
    dist.init_process_group("gloo", timeout=limit)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.network())
    optimizer = workload.optimizer(model)
    file = CheckpointFile(workload.directory)
    for step in range(file.load(model.module, optimizer), workload.total_steps):
        monitor.send_heartbeat()
        optimizer.zero_grad()
        loss = model(*workload.batch(step, rank))
        workload.fault_point(step, rank)
        loss.backward()
        optimizer.step()
        workload.stepped(step, world)
        file.save_when_due(model.module, optimizer, step, rank)
    workload.finished(model.module.parameters())
    monitor.shutdown_workload_monitoring()
    dist.destroy_process_group()
