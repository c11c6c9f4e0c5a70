"""midstep: the survivors stay, the newcomer gets its state from one of them, and the step is repeated."""

from pathlib import Path
from typing import TYPE_CHECKING

from .plan import Peer, Plan, Program, Start

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .workload import Workload

TUNED = Path(__file__).with_name("midstep-tuned.yaml")
NODES = 2


def launched(start: Start, policy: Path | None) -> Plan:
    """Return a job on two nodes where the ranks allow it."""
    ranks = start.trial.ranks
    nodes = NODES if ranks % NODES == 0 else 1
    size = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks // nodes)]
    directory = ["--job-dir", str(start.notes / "job")]
    under = ["--policy", str(policy)] if policy is not None else []
    command = [start.program("python"), "-m", "midstep.cli.main", "run", *size, *directory, *under, *start.script()]
    return Plan([Program(command)])


def _plan(start: Start) -> Plan:
    return launched(start, TUNED if start.tuned else None)


PEER = Peer("midstep", (), _plan)


def train(workload: "Workload") -> None:
    """Train; what happens in between is midstep's."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import midstep

    midstep.init_process_group()
    with midstep.building():
        network = workload.network()
    model = DistributedDataParallel(network)
    optimizer = workload.optimizer(model)
    loop(workload, model, optimizer)
    workload.finished(network.parameters())
    dist.destroy_process_group()


def loop(workload: "Workload", model: "nn.Module", optimizer: "torch.optim.Optimizer") -> None:
    """Do all steps, and repeat those that a fault interrupts; however the model is spread over ranks."""
    import torch.distributed as dist

    import midstep

    rank, world = dist.get_rank(), dist.get_world_size()
    state = midstep.TrainState(model=model, optimizer=optimizer)

    @midstep.resilient(state)
    def wrapped() -> None:
        for step in state.steps(workload.total_steps):
            optimizer.zero_grad()
            loss = model(*workload.batch(step.index, rank))
            workload.fault_point(step.index, rank)
            loss.backward()
            with step.update():
                optimizer.step()
            workload.stepped(step.index, world)

    wrapped()
