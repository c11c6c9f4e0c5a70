"""The sharding of every tool here: blocks and the whole model, by `fully_shard`, over rows of two ranks."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..kinds import COLUMNS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ..workload import Workload


def rows_and_columns(limit: timedelta | None = None) -> "DeviceMesh":
    """Return the mesh of all ranks. `limit`: the time that a collective may take; None: torch's own."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // COLUMNS, COLUMNS), mesh_dim_names=names)
    if limit is not None:  # its groups do not take over that of the world
        for name in names:
            distributed_c10d._set_pg_timeout(limit, mesh.get_group(name))
    return mesh


def shard(network: "nn.Module", mesh: "DeviceMesh") -> Any:
    """Shard each block, and what is left."""
    from torch.distributed.fsdp import fully_shard

    for block in network.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def step(workload: "Workload", model: "nn.Module", optimizer: "torch.optim.Optimizer", index: int, place: int) -> None:
    """Do one step, with the fault between forward and backward; the update is in `optimizer.step`."""
    optimizer.zero_grad()
    loss = model(*workload.batch(index, place))
    workload.fault_point(index, place)
    loss.backward()
    optimizer.step()


def finished(workload: "Workload", model: "nn.Module") -> None:
    """Gather the parameters, and note the end."""
    workload.finished([parameter.full_tensor() for parameter in model.parameters()])  # type: ignore[attr-defined]
