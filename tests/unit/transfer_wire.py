"""Links in memory between ranks that are threads, and a framework of plain tensors, for tests of transfers."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from midstep.processor import tree

DEADLINE_S = 10.0


class Wire:
    """Pairs of ranks; a send is over only when its receiver has taken it, as with a full socket."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[str, int, int, int], torch.Tensor] = {}
        self.taken: set[tuple[str, int, int, int]] = set()
        self.damage: Callable[[torch.Tensor], None] | None = None


@dataclass
class Handle:
    finish: Callable[[], None]

    def wait(self) -> None:
        self.finish()


class WireLinks:
    def __init__(self, wire: Wire, rank: int, name: str = "host") -> None:
        self._wire = wire
        self._rank = rank
        self._name = name
        self._next: dict[tuple[str, int], int] = {}

    def isend(self, tensor: torch.Tensor, rank: int) -> Handle:
        slot = (self._name, self._rank, rank, self._number("send", rank))
        wire = self._wire
        with wire.changed:
            wire.sent[slot] = tensor
            wire.changed.notify_all()
        return Handle(lambda: self._until(lambda: slot in wire.taken))

    def irecv(self, tensor: torch.Tensor, rank: int) -> Handle:
        slot = (self._name, rank, self._rank, self._number("receive", rank))
        wire = self._wire

        def finish() -> None:
            self._until(lambda: slot in wire.sent)
            with wire.changed:
                arrived = wire.sent.pop(slot).clone()
                assert arrived.shape == tensor.shape, "both ends cut differently"
                if wire.damage is not None:
                    wire.damage(arrived)
                tensor.copy_(arrived)
                wire.taken.add(slot)
                wire.changed.notify_all()

        return Handle(finish)

    def _number(self, kind: str, rank: int) -> int:
        self._next[kind, rank] = self._next.get((kind, rank), -1) + 1
        return self._next[kind, rank]

    def _until(self, there: Callable[[], bool]) -> None:
        with self._wire.changed:
            assert self._wire.changed.wait_for(there, DEADLINE_S), "deadlock"


@dataclass
class PlainShard:
    header: bytes
    tensors: Sequence[torch.Tensor]


@dataclass
class PlainShards:
    """Holds shards of plain tensors."""

    held: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def open_shard(self, shard_id: str) -> PlainShard:
        return PlainShard(tree.flatten(self.held[shard_id], shard_id)[0], self.held[shard_id])

    def accept_shard(self, shard_id: str, header: bytes) -> PlainShard:
        return PlainShard(header, [torch.zeros(slot.shape, dtype=slot.dtype) for slot in tree.slots(header)])

    def adopt_shard(self, shard_id: str, shard: PlainShard) -> None:
        self.held[shard_id] = list(shard.tensors)


def together(*work: Callable[[], Any]) -> list[Any]:
    """Do all of it at once; return what each returned or raised."""
    results: list[Any] = [None] * len(work)

    def run(index: int) -> None:
        try:
            results[index] = work[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), name=f"train{index}") for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    return results
