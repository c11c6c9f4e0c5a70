"""The ranks that hold one copy of a sharded model together: a row of its mesh."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from midstep.adapters.fsdp import shards
from midstep.adapters.fsdp.shards import find_replica
from midstep.processor.framework import ModelReplica


class Parameter:
    """A sharded parameter, as far as it is looked at."""

    def __init__(self, shape: tuple[int, ...], here: tuple[int, ...], *placements: Any) -> None:
        ranks = torch.arange(torch.Size(shape).numel()).view(shape)
        self.device_mesh = SimpleNamespace(mesh=ranks, ndim=len(shape), get_coordinate=lambda: list(here))
        self.placements = placements


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the replica of a rank that has these parameters, in a world of so many ranks."""
    monkeypatch.setattr(shards, "DTensor", Parameter)

    def find(world_size: int, *parameters: Any) -> ModelReplica | None:
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)
        module: Any = SimpleNamespace(parameters=lambda: iter(parameters))
        return find_replica([module])

    return find


def test_a_row_of_the_mesh_holds_a_copy_and_columns_are_its_places(found: Any) -> None:
    """HSDP; also where a parameter is not sharded at all."""
    row = Parameter((2, 3), (1, 2), Replicate(), Shard(0))
    assert found(6, row, torch.ones(2)) == ModelReplica(members=(3, 4, 5), peers=(2, 5))


def test_tensor_parallel_ranks_are_of_one_row_also_for_what_all_of_them_hold(found: Any) -> None:
    """A norm's weight is on all tensor parallel ranks, so it has more holders than there are replicas."""
    cut = Parameter((2, 1, 2), (0, 0, 1), Replicate(), Shard(0), Shard(1))
    norm = Parameter((2, 1, 2), (0, 0, 1), Replicate(), Shard(0), Replicate())
    elsewhere = Parameter((2, 1), (0, 0), Replicate(), Shard(0))  # a layer that is not cut
    elsewhere.device_mesh.mesh = torch.tensor([[1], [3]])
    assert found(4, elsewhere, norm, cut) == ModelReplica(members=(0, 1), peers=(1, 3))


@pytest.mark.parametrize(
    ("world_size", "parameters"),
    [
        (2, [Parameter((2,), (1,), Shard(0))]),  # each rank alone holds its pieces
        (8, [Parameter((2, 2), (0, 1), Replicate(), Shard(0))]),  # the mesh of a pipeline's stage
        (4, [torch.ones(2)]),
        (
            4,
            [
                Parameter((2, 2), (0, 1), Replicate(), Shard(0)),  # held by ranks 1 and 3
                Parameter((2, 2), (0, 1), Shard(0), Replicate()),  # held by ranks 0 and 1
            ],
        ),
    ],
)
def test_without_a_second_copy_of_all_there_is_no_replica(found: Any, world_size: int, parameters: Any) -> None:
    """Nor where parameters are copied along different dimensions."""
    assert found(world_size, *parameters) is None
