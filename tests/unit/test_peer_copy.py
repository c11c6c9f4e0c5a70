"""The copy of another rank's optimizer piece: the same bits wherever it is kept, and memory counted apart."""

from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch

from midstep.adapters.megatron import peer_copy
from midstep.adapters.megatron.peer_copy import HostPeerCopy, PeerCopy
from midstep.adapters.megatron.shards import ShardParts

CPU = torch.device("cpu")
SHAPES = ((5, 3), (7,), (2, 2, 2))


class Leaf:
    """What a Megatron optimizer is to a piece: something with torch's optimizer in it."""

    def __init__(self, kind: type[torch.optim.Optimizer], **options: Any) -> None:
        draw = torch.Generator().manual_seed(1)
        parameters = [torch.randn(shape, generator=draw) for shape in SHAPES]
        groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.1}]
        make: Any = kind
        self.optimizer: torch.optim.Optimizer = make(groups, **options)
        self.parameters = parameters


def owner(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[Leaf, ShardParts]:
    """Return an optimizer and the shard that it is."""
    leaf = Leaf(kind, **options)
    return leaf, ShardParts({}, {"optimizer0": leaf}, first=True)


def copied(piece: ShardParts, copy: PeerCopy) -> None:
    """Hand the piece over as a transfer does."""
    source = piece.open()
    room = copy.accept(source.header)
    for arrived, sent in zip(room.tensors, source.tensors, strict=True):
        arrived.copy_(sent)
    copy.adopt(room)


def gradients(step: int) -> list[torch.Tensor]:
    """Return the same gradients for the same step."""
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


@pytest.mark.parametrize("where", [PeerCopy, HostPeerCopy])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adam, {"weight_decay": 0.1}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})],
)
@pytest.mark.parametrize("stretch_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("started_at", [0, 3])
def test_a_copy_has_the_bits_of_what_it_is_a_copy_of(  # noqa: PLR0917 - what it is tried with
    monkeypatch: pytest.MonkeyPatch,
    where: type[PeerCopy],
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    stretch_bytes: int,
    started_at: int,
) -> None:
    """After each update all is equal."""
    monkeypatch.setattr(peer_copy, "_STRETCH_BYTES", stretch_bytes)
    leaf, piece = owner(kind, **options)
    copy = where(piece, CPU)
    assert not copy.held
    for step in range(6):
        if step == started_at:
            copied(piece, copy)
        for parameter, gradient in zip(leaf.parameters, gradients(step), strict=True):
            parameter.grad = gradient
        message = torch.cat(copy.message())
        leaf.optimizer.step()
        if step >= started_at:
            assert message.numel() == copy.arriving_bytes
            copy.take(message)
            copy.update()
            mine, other = piece.open(), copy.open()
            assert other.names == mine.names
            assert all(torch.equal(a, b) for a, b in zip(other.tensors, mine.tensors, strict=True))


def test_a_copy_gives_a_lost_rank_its_piece_back() -> None:
    """What the buddy opens is taken by a newcomer that has made no step."""
    leaf, piece = owner(torch.optim.Adam)
    copy = HostPeerCopy(piece, CPU)
    for parameter, gradient in zip(leaf.parameters, gradients(0), strict=True):
        parameter.grad = gradient
    leaf.optimizer.step()
    copied(piece, copy)
    newcomer, its_piece = owner(torch.optim.Adam)
    source = copy.open()
    room = its_piece.accept(source.header)
    for arrived, sent in zip(room.tensors, source.tensors, strict=True):
        arrived.copy_(sent)
    its_piece.adopt(room)
    assert all(torch.equal(a, b) for a, b in zip(newcomer.parameters, leaf.parameters, strict=True))
    assert torch.equal(
        newcomer.optimizer.state[newcomer.parameters[0]]["exp_avg"],
        leaf.optimizer.state[leaf.parameters[0]]["exp_avg"],
    )


def test_gradients_of_a_step_that_is_rolled_back_are_dropped() -> None:
    """Without gradients there is nothing that an update could do."""
    leaf, piece = owner(torch.optim.Adam)
    copy = PeerCopy(piece, CPU)
    copied(piece, copy)
    for parameter, gradient in zip(leaf.parameters, gradients(0), strict=True):
        parameter.grad = gradient
    copy.take(torch.cat(copy.message()))
    copy.forget()
    with pytest.raises(ValueError, match="zip"):
        copy.update()


def test_memory_on_the_device_and_on_the_host_is_counted_apart() -> None:
    """A copy in host memory leaves gradients and one stretch on the device."""
    _, piece = owner(torch.optim.Adam)
    large = 1_000_000_000
    assert PeerCopy(piece, CPU).memory(large) == (20 * large, 0)
    on_device, on_host = HostPeerCopy(piece, CPU).memory(large)
    assert on_host == 12 * large
    assert 8 * large < on_device < 9 * large
