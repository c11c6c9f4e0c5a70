"""Parts of torch that stand on process groups keep their groups, and work before and after a reconnect."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from packaging.version import Version
from tests.contract.makers import Setup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from midstep.protocol.errors import CommunicatorError

if TYPE_CHECKING:
    from tests.contract.gloo.conftest import Rank, Ranks

WORLD = 2
LINK_UP_S = 20.0
FSDP_NEEDS, FSDP_AVERAGES = Version("2.7"), Version("2.8")  # on a CPU: before, torch's own gives sums over gloo


def make_layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))


def step_fully_sharded(model: torch.nn.Module, number: int) -> list[Any]:
    """Take one step and return what the gradients are, whole."""
    model.zero_grad()
    model(torch.full((1, 8), float(number))).sum().backward()
    answer = []
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        answer.append(parameter.grad.full_tensor().tolist())
    return answer


def use_functionals(mesh: Any, number: int) -> list[Any]:
    tensor = torch.arange(4.0) + number
    total = functional.all_reduce(tensor, "sum", mesh.get_group())
    part = functional.reduce_scatter_tensor(tensor, "sum", 0, (mesh, 0))
    return [total.tolist(), part.tolist()]


def use_until_it_fails(mesh: Any, number: int) -> None:
    while True:
        use_functionals(mesh, number)


def shard(rank: Rank, *, newcomer: bool) -> None:
    communicator = rank.join(connected=not newcomer)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
    model = make_layers()
    fully_shard(model, mesh=mesh)
    if newcomer:
        communicator.reconnect(rank.hear(), rank.store, LINK_UP_S)
    while True:
        rank.say((step_fully_sharded(model, rank.number), use_functionals(mesh, rank.number)))
        rank.hear()
        with pytest.raises((CommunicatorError, RuntimeError), match="failed"):
            use_until_it_fails(mesh, rank.number)
        communicator.abort("a peer died")
        communicator.reconnect(rank.hear(), rank.store, LINK_UP_S)


@pytest.mark.skipif(Version(torch.__version__) < FSDP_NEEDS, reason="this torch's fully_shard wants an accelerator")
def test_a_device_mesh_and_a_fully_sharded_model_go_on_after_a_reconnect(ranks: Ranks) -> None:
    ranks.start_all(WORLD, lambda rank: shard(rank, newcomer=False))
    before = ranks.hear_all()
    mean = make_layers()
    mean(torch.full((1, 8), 0.5)).sum().backward()
    whole = [parameter.grad.tolist() for parameter in mean.parameters() if parameter.grad is not None]
    factor = WORLD if Version(torch.__version__) < FSDP_AVERAGES else 1
    for gradients, (total, _) in before:
        assert [torch.tensor(g) for g in gradients] == [pytest.approx(factor * torch.tensor(g)) for g in whole]
        assert total == [1.0, 3.0, 5.0, 7.0]
    assert [part for _, (_, part) in before] == [[1.0, 3.0], [5.0, 7.0]]
    for generation in (1, 2):
        ranks.signal(1, signal.SIGKILL)
        ranks.say("go on", 0)
        ranks.start(1, WORLD, lambda rank: shard(rank, newcomer=True))
        ranks.say(generation)
        assert ranks.hear_all() == before


def interrupt_backward(rank: Rank) -> None:
    """Be interrupted in the reducer, then rebuild the model's reducer and go on."""
    communicator = rank.join()
    layers = make_layers()
    model = DistributedDataParallel(layers, broadcast_buffers=False, bucket_cap_mb=0.0001)
    generation = 0
    while True:
        model.zero_grad()
        model(torch.full((1, 8), float(rank.number))).sum().backward()
        rank.say([parameter.grad.tolist() for parameter in layers.parameters() if parameter.grad is not None])
        rank.hear()
        if rank.number == 0:
            with pytest.raises((CommunicatorError, RuntimeError), match="failed"):
                model(torch.ones(1, 8)).sum().backward()
        communicator.abort("the test said so")
        generation += 1
        communicator.reconnect(generation, rank.store, LINK_UP_S)
        model = DistributedDataParallel(layers, broadcast_buffers=False, bucket_cap_mb=0.0001)


def test_a_model_whose_backward_pass_was_interrupted_is_wrapped_anew_and_gives_the_same(ranks: Ranks) -> None:
    ranks.start_all(WORLD, interrupt_backward)
    before = ranks.hear_all()
    assert before[0] == before[1]
    for _ in range(3):
        ranks.say("go on", 0)
        # Rank 1 leaves the world while rank 0 waits for it in the reducer.
        ranks.say("go on", 1)
        assert ranks.hear_all() == before


def build_unconnected(rank: Rank) -> None:
    """Make everything that a newcomer may make before it can talk to anybody."""
    setup = Setup(rank, connected=False)
    communicator = setup.communicator
    group = dist.new_group([0, 1])
    tensor = torch.full((4,), float(rank.number))
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, 0)
    dist.barrier()
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, rank.number)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, tensor)
    exchanged = torch.empty(4)
    dist.all_to_all_single(exchanged, torch.arange(4.0))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    rank.say((tensor.tolist(), everybody, part.tolist(), work.is_completed(), communicator.failed))
    communicator.reconnect(1, rank.store, setup.maker.link_up_s)
    dist.all_reduce(tensor, group=group)
    rank.say(tensor.tolist())


@pytest.mark.makers("gloo", "fake", "npu")
def test_an_unconnected_rank_gets_back_what_it_put_in(ranks: Ranks) -> None:
    ranks.start(1, WORLD, build_unconnected)
    assert ranks.hear(1) == ([1.0] * 4, [1, 1], [1.0, 1.0], True, None)
    ranks.start(0, WORLD, build_unconnected)
    assert ranks.hear(0) == ([0.0] * 4, [0, 0], [0.0, 0.0], True, None)
    assert ranks.hear_all() == [[1.0] * 4] * 2
