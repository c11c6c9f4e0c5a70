"""Measure the load of a large job's link-up on its rendezvous store: real store and clients, played collectives.

Each rank is a thread with a connection of its own, and exchanges addresses with the members of its groups as a rebuild
does: the world, and the groups of tensor (8), pipeline (8) and data parallelism. All ranks share the machine's cores
with the store, so the times are those of this machine; keys and round trips are not. What gloo or HCCL do themselves
comes on top.
"""

import json
import math
import secrets
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import figures
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from midstep.communicators.background import BackgroundTask
from midstep.communicators.rendezvous import GenerationStore, StoreConnection
from midstep.protocol.types import Rendezvous, StoreEndpoint

LIMIT_S = 300.0
TENSOR, PIPELINE = 8, 8
MESSAGE = "10.0.0.1:40000 " + "0" * 64  # an address and a nonce


class CountedStore:
    """A store whose calls are counted: each is a round trip."""

    def __init__(self, store: Any, calls: Counter[str]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Any:
        self._calls[name] += 1
        return getattr(self._store, name)


def groups_of(rank: int, size: int) -> dict[str, list[int]]:
    """Return the groups of a rank by name: tensor inside data inside pipeline, as Megatron has them."""
    tensor = min(TENSOR, size)
    stage = max(tensor, size // PIPELINE)
    first, place = rank - rank % tensor, rank % stage
    begin = rank - place
    return {
        "world": list(range(size)),
        f"tensor{first}": list(range(first, first + tensor)),
        f"data{begin}.{rank % tensor}": list(range(begin + rank % tensor, begin + stage, tensor)),
        f"pipeline{place}": list(range(place, size, stage)),
    }


def link_up(rank: int, size: int, rendezvous: Rendezvous, generation: int) -> Counter[str]:
    """Do what one rank does; return its calls."""
    calls: Counter[str] = Counter()
    connection = StoreConnection(StoreEndpoint(rendezvous.host, rendezvous.port), LIMIT_S)
    connection.store = CountedStore(connection.store, calls)  # type: ignore[assignment]
    store = GenerationStore(connection, rendezvous, generation)

    def exchange(task: BackgroundTask[bool]) -> bool:
        for name, members in groups_of(rank, size).items():
            told = store.exchange(task, name, members, rank, MESSAGE, missing="has not come")
            assert told == [MESSAGE] * len(members)
        return True

    assert BackgroundTask(exchange, time.monotonic() + LIMIT_S).result()
    return calls


def measure(size: int) -> dict[str, Any]:
    """Link up one world."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    rendezvous = Rendezvous("127.0.0.1", server.port, secrets.token_hex(16))
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(size) as ranks:
        calls = list(ranks.map(lambda rank: link_up(rank, size, rendezvous, 1), range(size)))
    total = sum(calls, Counter[str]())
    return {
        "ranks": size,
        "keys": int(server.num_keys()),
        "round_trips": total.total(),
        "round_trips_per_rank": total.total() / size,
        "calls": dict(total),
        "wall_s": time.monotonic() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
    }


@click.command(help=__doc__)
@click.option("--ranks", "sizes", default="64,256,1024", show_default=True, help="Sizes of the world.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all figures to FILE.")
def main(sizes: str, path: Path | None) -> None:
    """Measure all sizes; print a table, and write JSON where it is asked for."""
    print(f"{'ranks':>6} {'keys':>7} {'round trips':>12} {'a rank':>8} {'s':>8} {'CPU s':>8}")
    rows = []
    for size in map(int, sizes.split(",")):
        rows.append(row := measure(size))
        print(
            f"{size:>6} {row['keys']:>7} {row['round_trips']:>12} {row['round_trips_per_rank']:>8.1f}"
            f" {row['wall_s']:>8.2f} {row['cpu_s']:>8.2f}",
            flush=True,
        )
    if len(rows) > 1:
        grown = math.log(rows[-1]["ranks"] / rows[0]["ranks"])
        power = math.log(rows[-1]["round_trips"] / rows[0]["round_trips"]) / grown
        print(f"round trips grow with the power {power:.2f} of the ranks")
    if path is not None:
        path.write_text(json.dumps({"machine": figures.machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
