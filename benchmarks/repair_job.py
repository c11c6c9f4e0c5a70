"""One of the two processes that `repair.py` measures: rank 0 has the state, rank 1 has lost it, again and again.

Each round moves as many bytes twice: as the communicator does when nothing else is done, into memory that was used
before, and as a repair does, into a newcomer's, right after the link-up of the next generation.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

import midstep
from midstep.adapters.ddp.replicated_state import SHARD_ID
from midstep.communicators.gloo.communicator import GlooCommunicator
from midstep.examples.gpt import GPT, TEN_MILLION
from midstep.processor import transfer
from midstep.protocol.types import Rendezvous, RepairPart, RestoreSource, ShardTransfer

HOST = "127.0.0.1"
SOURCE, NEWCOMER = range(2)
PIECE_BYTES = 4 * 1024 * 1024
LIMIT_S = 60.0


class Pair:
    """This process's end of the pair."""

    def __init__(self, rank: int, store: Rendezvous) -> None:
        self.rank = rank
        self._store = store
        self._generation = 1
        self.links = GlooCommunicator()
        self.links.init(rank=rank, world_size=2, generation=1, store=store, collective_s=LIMIT_S, link_up_s=LIMIT_S)
        torch.manual_seed(1)
        model = GPT(TEN_MILLION)
        self._optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()
        self._state = midstep.TrainState(model=model, optimizer=self._optimizer)
        self.size_bytes = self._state.shards()[0].size_bytes
        self._pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(self.size_bytes // PIECE_BYTES)]
        self.stages: dict[str, float] = {}
        for name in ("open_shard", "accept_shard", "adopt_shard"):
            setattr(self._state, name, self._timed(name, getattr(self._state, name)))

    def raw(self) -> float:
        """Return the bytes per second of the transport alone."""
        self.links.barrier()
        began_s = time.monotonic()
        start, peer = (self.links.isend, NEWCOMER) if self.rank == SOURCE else (self.links.irecv, SOURCE)
        for handle in [start(piece, peer) for piece in self._pieces]:
            handle.wait()
        return len(self._pieces) * PIECE_BYTES / (time.monotonic() - began_s)

    def repair(self) -> float:
        """Return the bytes per second of a repair, from the first header to the adopted state."""
        moved = ShardTransfer(SHARD_ID, 0, self.size_bytes, SOURCE, NEWCOMER)
        part = RepairPart(target_step=1, restore=RestoreSource.REPLICA, transfers=(moved,), local_states=())
        if self.rank == NEWCOMER:
            self._optimizer.state.clear()
            self._state.expect_shard(SHARD_ID, self.size_bytes)
        self._generation += 1
        self.links.reconnect(self._generation, self._store, LIMIT_S)
        self.stages = {}
        began_s = time.monotonic()
        transfer.run_transfers(
            part, rank=self.rank, framework=self._state, links=self.links, read_local_state=lambda rank, step: None
        )
        return self.size_bytes / (time.monotonic() - began_s)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.monotonic()
            try:
                return call(*arguments)
            finally:
                self.stages[name] = time.monotonic() - began_s

        return timed


def main() -> None:
    """Take the rank, the port of the store, the number of rounds, and where to write what was measured."""
    rank, port, rounds, notes = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    store = TCPStore(HOST, port, is_master=rank == SOURCE, wait_for_workers=False)
    pair = Pair(rank, Rendezvous(HOST, port, "of this benchmark"))
    found = []
    for _ in range(rounds):
        raw = pair.raw()
        found.append({"raw": raw, "repair": pair.repair(), "stages": pair.stages})
    notes.write_text(json.dumps({"size_bytes": pair.size_bytes, "rounds": found}))
    pair.links.barrier()
    del store
    os._exit(0)  # nothing is to be saved, and gloo's threads need not be waited for


if __name__ == "__main__":
    main()
