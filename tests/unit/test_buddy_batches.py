"""Buddies hand over what they send and what they receive together: a device that takes one after the other would stop.

No fake does that (docs/npu.md), so what is handed to torch is looked at.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from midstep.adapters import buddies as buddies_module
from midstep.adapters.buddies import Buddies, pair

HEADER = b"what is in it"
BUDDY, COPIED = 1, 2  # of rank 0, in a world of three


class Piece:
    """One tensor, as this rank's own piece, and room for the copied rank's."""

    device = torch.device("cpu")
    held = False

    def __init__(self) -> None:
        self.shard = SimpleNamespace(header=HEADER, tensors=[torch.ones(3)])

    def open(self) -> Any:
        return self.shard

    def accept(self, header: bytes) -> Any:
        assert header == HEADER
        return SimpleNamespace(header=header, tensors=[torch.zeros(2)])

    def adopt(self, shard: Any) -> None:
        self.adopted = shard


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[tuple[str, int]]]]:
    """What is handed to torch, batch by batch; the copied rank sends two sevens. What goes alone is refused."""
    arriving = iter([torch.tensor([1]), torch.tensor([len(HEADER)]), torch.tensor(list(HEADER)), torch.full((2,), 7.0)])
    found: list[list[tuple[str, int]]] = []

    def batch(operators: list[dist.P2POp]) -> list[dist.Work]:
        found.append([(each.op.__name__, each.peer) for each in operators])
        for each in operators:
            if each.op is dist.irecv:
                each.tensor.copy_(next(arriving))
        return []

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    group = type(dist.distributed_c10d._get_default_group())
    for alone in ("send", "recv"):
        monkeypatch.setattr(group, alone, lambda *_: pytest.fail("a send or a receive of its own"))
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    yield found
    dist.destroy_process_group()


def test_pieces_are_handed_on_and_taken_in_batches(batches: list[list[tuple[str, int]]]) -> None:
    """Each rank of a ring sends and receives at once: length, header and tensors, one after the other."""
    piece: Any = Piece()
    buddies = Buddies(Piece().open, piece, pair(0, range(3), 1))
    buddies.seed()
    assert batches[0] == [("isend", COPIED), ("irecv", BUDDY)]
    assert batches[1:] == [[("isend", BUDDY), ("irecv", COPIED)]] * 3
    assert piece.adopted.tensors[0].tolist() == [7.0, 7.0]


class Sender(Piece):
    """A piece whose messages are as long as they are asked to be."""

    arriving_bytes = 3

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[list[int]] = []

    def message(self) -> list[torch.Tensor]:
        return [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3], dtype=torch.uint8)]

    def take(self, message: torch.Tensor) -> None:
        self.taken.append(message.tolist())

    def forget(self) -> None:
        pass


def test_messages_use_the_same_memory_in_each_step_until_one_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo may yet write what was under way where it was to go."""
    handed: list[tuple[int, int]] = []

    def batch(outgoing: torch.Tensor, _to: int, incoming: torch.Tensor, _source: int) -> list[Any]:
        handed.append((outgoing.data_ptr(), incoming.data_ptr()))
        incoming.copy_(outgoing)
        return []

    monkeypatch.setattr(buddies_module, "_batch", batch)
    piece: Any = Sender()
    buddies = Buddies(piece.open, piece, pair(0, range(3), 1))
    for _ in range(2):
        buddies.send()
        buddies.arrive()
    kept = buddies._kept  # so that its memory is not given out again
    buddies.forget_step()
    buddies.send()
    assert handed[0] == handed[1]
    assert not {*handed[0]} & {*handed[2]}
    assert piece.taken == [[1, 2, 3]] * 2
    assert [each.numel() for each in kept] == [3, 3]
