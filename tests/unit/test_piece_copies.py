"""The copy of a piece of a sharded model: the same bits after each update, whatever the optimizer keeps."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from midstep.adapters.buddies import Pair, pair
from midstep.adapters.fsdp import peer_copy
from midstep.adapters.fsdp.peer_copy import PieceCopy, refuse_unrepeatable
from midstep.adapters.fsdp.shards import ELEMENTWISE, Piece, local, shard_name
from midstep.adapters.fsdp.state import ShardedTrainState
from midstep.protocol.errors import ConfigurationError

RANK, OTHER = 0, 1
STEPS = 5
SUPPORTED = sorted(ELEMENTWISE - {torch.optim.Rprop}, key=str)  # torch itself cannot apply that to sharded parameters


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=2)
    yield
    dist.destroy_process_group()


def sharded(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[ShardedTrainState, Piece]:
    """Return the state of a model whose rows are divided unevenly, and of which one layer is frozen."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    fully_shard(model)
    first, rest = list(model[0].parameters()), [*model[1].parameters(), *model[2].parameters()]
    optimizer = kind([{"params": first, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}], **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=STEPS)
    state = ShardedTrainState(model, optimizer, scheduler)
    return state, state._pieces[shard_name((RANK,))]


def copy_of_own(state: ShardedTrainState, own: Piece) -> PieceCopy:
    """Return a copy of this rank's own piece, handed over as a transfer does. Its buddy has the same."""
    copy = PieceCopy(RANK, own.registered, state.registry, frozenset())
    source = own.open()
    room = copy.accept(source.header)
    for arrived, sent in zip(room.tensors, source.tensors, strict=True):
        arrived.copy_(sent)
    assert not copy.held
    copy.adopt(room)
    assert copy.held
    return copy


def set_gradients(state: ShardedTrainState, step: int) -> None:
    """Give parameters gradients: all that train but one in each step."""
    draw = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(state.trained()):
        gradient = torch.randn(local(parameter).shape, generator=draw)
        parameter.grad = None if index == step % 3 else torch.zeros_like(parameter)
        if parameter.grad is not None:
            local(parameter.grad).copy_(gradient)


def update(state: ShardedTrainState, copy: PieceCopy) -> None:
    """Update the copy and then this rank's own, as the hooks of a step do; then the rates."""
    message = torch.cat(copy.message())
    assert message.numel() == copy.arriving_bytes == copy.sent_bytes
    copy.take(message)
    assert copy.update("optimizer")
    state.registry.optimizers["optimizer"].step()
    state.registry.schedulers["scheduler"].step()


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("started_at", [0, 3])
def test_a_copy_has_the_bits_of_what_it_is_a_copy_of(kind: Any, foreach: bool, started_at: int) -> None:
    """And its header, which says how both are cut. Rates change; a parameter has no gradient, and one never has."""
    state, own = sharded(kind, lr=0.1, foreach=foreach)
    copy: PieceCopy | None = None
    for step in range(STEPS):
        if step == started_at:
            copy = copy_of_own(state, own)
        set_gradients(state, step)
        if copy is None:
            state.registry.optimizers["optimizer"].step()
            continue
        update(state, copy)
        mine, other = own.open(), copy.open()
        assert other.header == mine.header
        assert all(torch.equal(a, b) for a, b in zip(other.tensors, mine.tensors, strict=True))


def test_a_copy_is_cut_as_the_piece_of_its_owner() -> None:
    """Of five rows the first rank has three; the last layer has one row, of which the second rank has nothing."""
    state, own = sharded()
    copy = PieceCopy(OTHER, own.registered, state.registry, frozenset())
    shapes = {path: tuple(tensor.shape) for path, tensor in copy._parameters()["model"].items()}
    assert shapes["0.weight"] == (2, 4)
    assert shapes["2.weight"] == (0, 3)
    extents = copy.layout().parameters["model"]
    assert extents["0.weight"].offsets == (3, 0)
    assert own.layout().parameters["model"]["0.weight"].offsets == (0, 0)


def test_a_lost_rank_gets_from_its_buddy_what_it_had() -> None:
    """The optimizer's state of a newcomer is cut as its parameters again."""
    state, own = sharded()
    copy = copy_of_own(state, own)
    set_gradients(state, 0)
    update(state, copy)
    newcomer, its_own = sharded()
    source = copy.open()
    room = its_own.accept(source.header)
    for arrived, sent in zip(room.tensors, source.tensors, strict=True):
        arrived.copy_(sent)
    its_own.adopt(room)
    for mine, theirs in zip(own.open().tensors, its_own.open().tensors, strict=True):
        assert torch.equal(mine, theirs)
    parameter = newcomer.trained()[1]  # the first one had no gradient
    moment = newcomer.registry.optimizers["optimizer"].state[parameter]["exp_avg"]
    assert moment.placements == parameter.placements  # type: ignore[attr-defined]


def test_gradients_that_change_after_they_were_sent_are_refused() -> None:
    """A script that clips within the update would leave its buddy with another state."""
    state, own = sharded()
    copy = copy_of_own(state, own)
    set_gradients(state, 0)
    copy.take(torch.cat(copy.message()))
    local(state.trained()[1].grad).mul_(0.5)
    with pytest.raises(ConfigurationError, match="gradients of optimizer are changed inside"):
        copy.update("optimizer")


def test_an_optimizer_that_steps_twice_in_one_update_is_refused() -> None:
    """Its gradients are gone by then."""
    state, own = sharded()
    copy = copy_of_own(state, own)
    set_gradients(state, 0)
    update(state, copy)
    with pytest.raises(ConfigurationError, match="steps twice in one update block"):
        copy.refuse_second("optimizer")
    copy.take(torch.cat(copy.message()))
    copy.refuse_second("optimizer")


def test_gradients_of_a_step_that_is_rolled_back_are_dropped() -> None:
    """The repeated step sends its own."""
    state, own = sharded()
    copy = copy_of_own(state, own)
    set_gradients(state, 0)
    copy.take(torch.cat(copy.message()))
    copy.forget()
    before = [tensor.clone() for tensor in copy.open().tensors]
    copy.update("optimizer")
    assert all(torch.equal(a, b) for a, b in zip(copy.open().tensors, before, strict=True))


class Weighed(torch.optim.AdamW):
    """An optimizer of the script's own."""


def test_updates_that_cannot_be_repeated_are_refused_in_one_error() -> None:
    """An optimizer that may do anything, gradients that are scaled within it, parameters that no other rank has."""
    state, own = sharded(Weighed)
    alone: Any = SimpleNamespace(mesh_ranks=(RANK,))
    state.registry.scalers["scaler"] = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigurationError) as refused:
        refuse_unrepeatable(state.registry, alone)
    for reason in ("optimizer is a Weighed", "scaler scales gradients", "have in common are too few: 0"):
        assert reason in str(refused.value)
    assert own.mesh_ranks == (RANK, OTHER)
    state, own = sharded()
    refuse_unrepeatable(state.registry, own)


@pytest.mark.parametrize(
    ("rank", "among", "ranks_per_node", "expected"),
    [
        (0, range(4), 2, Pair(2, 2, same_node=False)),
        (1, range(6), 2, Pair(3, 5, same_node=False)),
        (1, range(4), 4, Pair(2, 0, same_node=True)),
        (0, (0, 2), 2, Pair(2, 2, same_node=False)),  # the ranks of a column, one of each node
        (5, (1, 3, 5, 7), 4, Pair(1, 1, same_node=False)),
    ],
)
def test_a_buddy_is_on_another_node_if_there_is_one(rank: int, among: Any, ranks_per_node: int, expected: Pair) -> None:
    """In a ring of the ranks that hold pieces of the same parameters."""
    assert pair(rank, among, ranks_per_node) == expected


def test_gradients_of_any_size_lie_where_their_type_can_be_read() -> None:
    """Behind a parameter of two bytes there may be one of four."""
    message = torch.arange(24, dtype=torch.uint8)
    assert (
        peer_copy._aligned(message[2:10], 4).view(torch.int32).tolist()
        == message[2:10].clone().view(torch.int32).tolist()
    )
