"""midstep: the newcomer gets its pieces from the rank of the other row, and the step is repeated."""

from pathlib import Path
from typing import TYPE_CHECKING

from .. import midstep as replicated
from ..plan import Peer, Plan, Start
from . import mesh

if TYPE_CHECKING:
    from ..workload import Workload

POLICIES = Path(__file__).parent


def _plan(start: Start) -> Plan:
    return replicated.launched(start, POLICIES / ("midstep-tuned.yaml" if start.tuned else "midstep-default.yaml"))


PEER = Peer("midstep", (), _plan)


def train(workload: "Workload") -> None:
    """Train; what happens in between is midstep's."""
    import torch.distributed as dist

    import midstep

    midstep.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    with midstep.building():
        network = workload.network()
    model = mesh.shard(network, mesh.rows_and_columns())
    optimizer = workload.optimizer(model)
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
    mesh.finished(workload, model)
    dist.destroy_process_group()
