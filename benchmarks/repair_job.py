"""One of the processes that `repair.py` measures: the last rank has lost the state, again and again; others have it.

Each round moves as many bytes twice: as the communicator does when nothing else is done, into memory that was used
before, and as a repair does, into a newcomer's, right after the link-up of the next generation.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

import midstep
from midstep.communicators.gloo.communicator import GlooCommunicator
from midstep.examples.gpt import GPT, TEN_MILLION, Shape
from midstep.processor import transfer
from midstep.processor.range_transfer import IN_FLIGHT_OF_PAIR
from midstep.processor.whole_state import SHARD_ID
from midstep.protocol.types import Rendezvous, RepairPart, RestoreSource, ShardTransfer

HOST = "127.0.0.1"
PIECE_BYTES = 4 * 1024 * 1024
MOST_PIECES = 64  # that are in memory; one is sent again and again
LIMIT_S = 60.0
SHAPES = {  # by megabytes of parameters with Adam's state
    10: Shape(),
    126: TEN_MILLION,
    1000: Shape(layers=12, heads=6, width=756, context=64, dropout=0.0),
}


class Order(msgspec.Struct, frozen=True):
    """The instructions of a process: who it is, where the ranks meet, what is moved how often, where its notes go."""

    rank: int
    sources: int
    port: int
    megabytes: int
    rounds: int
    notes: str

    @property
    def newcomer(self) -> int:
        """The rank that has lost its state."""
        return self.sources


class Member:
    """This process's end of the transfers."""

    def __init__(self, order: Order, store: Rendezvous) -> None:
        self._order = order
        self._store = store
        self._generation = 1
        self.links = GlooCommunicator()
        self.links.init(
            rank=order.rank,
            world_size=order.sources + 1,
            generation=1,
            store=store,
            collective_s=LIMIT_S,
            link_up_s=LIMIT_S,
        )
        torch.manual_seed(1)
        model = GPT(SHAPES[order.megabytes])
        self._optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._state = midstep.TrainState(model=model, optimizer=self._optimizer)
        self.size_bytes = self._state.shards()[0].size_bytes
        self._share = -(-self.size_bytes // (order.sources * PIECE_BYTES))  # pieces of each source
        self._pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(MOST_PIECES)]
        self.stages: dict[str, float] = {}
        for name in ("open_shard", "accept_shard", "adopt_shard"):
            setattr(self._state, name, self._timed(name, getattr(self._state, name)))

    @property
    def _is_newcomer(self) -> bool:
        return self._order.rank == self._order.newcomer

    def raw(self) -> float:
        """Return the bytes per second of the transport alone."""
        most = len(self._pieces) - self._order.sources
        under_way: deque[Any] = deque()
        self.links.barrier()
        began_s = time.monotonic()
        for number in range(self._share):
            under_way.extend(self._start(number))
            while len(under_way) > most:
                under_way.popleft().wait()
        for handle in under_way:
            handle.wait()
        return self._share * self._order.sources * PIECE_BYTES / (time.monotonic() - began_s)

    def _start(self, number: int) -> list[Any]:
        """Send piece `number`; in the newcomer, receive that of each source."""
        if not self._is_newcomer:
            return [self.links.isend(self._pieces[number % len(self._pieces)], self._order.newcomer)]
        first, sources = number * self._order.sources, range(self._order.sources)
        return [self.links.irecv(self._pieces[(first + each) % len(self._pieces)], each) for each in sources]

    def repair(self, *, over_pairs: bool) -> float:
        """Return the bytes per second of a repair, from the first header to the adopted state.

        `over_pairs`: over links between pairs, as what moves early does, all links being up. Else over gloo's.
        """
        part = RepairPart(target_step=1, restore=RestoreSource.REPLICA, transfers=tuple(self._transfers()))
        if self._is_newcomer:
            self._optimizer.state.clear()
            self._state.expect_shard(SHARD_ID, self.size_bytes)
        self._generation += 1
        pairs = self.links.open_pairs(self._generation, self._store, LIMIT_S)
        if over_pairs:
            pairs.connect(range(self._order.newcomer) if self._is_newcomer else [self._order.newcomer])
        self.links.reconnect(self._generation, self._store, LIMIT_S)
        self.stages = {}
        began_s = time.monotonic()
        opened = transfer.open_sources(part, rank=self._order.rank, framework=self._state)
        arrived = transfer.move(
            part,
            opened,
            rank=self._order.rank,
            framework=self._state,
            links=pairs if over_pairs else self.links,
            in_flight=IN_FLIGHT_OF_PAIR if over_pairs else None,
        )
        transfer.adopt(arrived, self._state)
        spent_s = time.monotonic() - began_s
        pairs.close()
        return self.size_bytes / spent_s

    def _transfers(self) -> list[ShardTransfer]:
        """Return what this rank sends or receives: an equal range of the shard from each source."""
        sources, newcomer = self._order.sources, self._order.newcomer
        cuts = [self.size_bytes * source // sources for source in range(sources + 1)]
        ranges = [
            ShardTransfer(SHARD_ID, cuts[source], cuts[source + 1] - cuts[source], source, newcomer)
            for source in range(sources)
        ]
        return ranges if self._is_newcomer else [ranges[self._order.rank]]

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.monotonic()
            try:
                return call(*arguments)
            finally:
                self.stages[name] = time.monotonic() - began_s

        return timed


def forget_peak() -> None:
    """Let the kernel count this process's peak of memory from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes(what: str) -> int:
    """Return a figure of this process's memory: `VmRSS` is in use, `VmHWM` was the most that was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def one_round(member: Member, *, newcomer: bool) -> dict[str, Any]:
    """Move the state in all three ways, and count the CPU time of all threads.

    `extra_bytes`: what a repair needs for a while beside the state that it moves.
    """
    over_pairs_s = -time.process_time()
    over_pairs = member.repair(over_pairs=True)
    over_pairs_s += time.process_time()
    began_s = time.process_time()
    raw = member.raw()
    between_s = time.process_time()
    before = memory_bytes("VmRSS")
    forget_peak()
    repair = member.repair(over_pairs=False)
    held = memory_bytes("VmRSS") if newcomer else before
    return {
        "raw": raw,
        "repair": repair,
        "pairs": over_pairs,
        "pairs_cpu_s": over_pairs_s,
        "stages": member.stages,
        "raw_cpu_s": between_s - began_s,
        "repair_cpu_s": time.process_time() - between_s,
        "extra_bytes": max(0, memory_bytes("VmHWM") - held),
    }


def main() -> None:
    """Take an order as JSON, and write down what was measured."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    torch.set_num_threads(1)
    store = TCPStore(HOST, order.port, is_master=order.rank == 0, wait_for_workers=False)
    member = Member(order, Rendezvous(HOST, order.port, "of this benchmark"))
    found = [one_round(member, newcomer=order.rank == order.newcomer) for _ in range(order.rounds)]
    Path(order.notes).write_text(json.dumps({"size_bytes": member.size_bytes, "rounds": found}))
    member.links.barrier()
    del store
    os._exit(0)  # nothing is to be saved, and gloo's threads need not be waited for


if __name__ == "__main__":
    main()
