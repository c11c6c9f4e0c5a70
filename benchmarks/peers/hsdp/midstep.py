"""midstep: the newcomer gets its pieces from the rank of the other row, and the step is repeated."""

from typing import TYPE_CHECKING

import yaml

from .. import midstep as replicated
from ..plan import Peer, Plan, Start
from . import mesh

if TYPE_CHECKING:
    from ..workload import Workload

# Of docs/fsdp.md: modules that the fork server imports ahead of a replacement.
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.device_mesh"]


def _plan(start: Start) -> Plan:
    policy = yaml.safe_load(replicated.TUNED.read_text()) if start.tuned else {}
    policy["standby"] = {**policy.get("standby", {}), "preload": PRELOAD}
    path = start.notes / "policy.yaml"
    path.write_text(yaml.safe_dump(policy))
    return replicated.launched(start, path)


PEER = Peer("midstep", (), _plan)


def train(workload: "Workload") -> None:
    """Train; what happens in between is midstep's."""
    import torch.distributed as dist

    import midstep

    midstep.init_process_group()
    with midstep.building():
        network = workload.network()
    model = mesh.shard(network, mesh.rows_and_columns())
    optimizer = workload.optimizer(model)
    replicated.loop(workload, model, optimizer)
    mesh.finished(workload, model)
    dist.destroy_process_group()
