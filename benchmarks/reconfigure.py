"""Compare a link-up of midstep's gloo communicator with torch's own live reconfigure, which torch has since 2.14.

    python benchmarks/reconfigure.py [--ranks 2,4,8] [--repeat 10] [--json FILE]

Both ways have ranks of their own, real processes on one store, and are told by turns to connect: when all have stayed,
and when one was killed and a fork has taken its place, which is ready by then. What counts is the time from the order
until all ranks have added something up. With a torch that has no reconfigure only midstep's way is measured.

What the two do is not the same. midstep's groups check each link and authenticate their peers, and can be aborted while
they wait. Each has the default group alone.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import PrefixStore, TCPStore

from midstep.benchmarks import figures
from midstep.benchmarks.link_ups import serve_store
from midstep.communicators.gloo.communicator import GlooCommunicator
from midstep.protocol.types import Rendezvous

LINK_UP_S = 10.0
ANSWER_S = 3 * LINK_UP_S
HOST = "127.0.0.1"
STAYED, REPLACED = HAPPENINGS = ("all stay", "one replaced")
UP = "up"
_FORK = multiprocessing.get_context("fork")


class Midstep:
    """Connects by midstep's communicator."""

    def __init__(self, rank: int, size: int, store: Rendezvous) -> None:
        self._communicator, self._store = GlooCommunicator(), store
        times = {"collective_s": LINK_UP_S, "link_up_s": LINK_UP_S}
        self._communicator.init(rank=rank, world_size=size, generation=0, store=None, **times)

    def connect(self, generation: int) -> None:
        """Leave the last generation, and connect in this one."""
        self._communicator.abort("a new generation")
        self._communicator.reconnect(generation, self._store, LINK_UP_S)


class Torch:
    """Connects by torch's reconfigure: handles go over the store, in the order of ranks."""

    def __init__(self, rank: int, size: int, store: Rendezvous) -> None:
        self._rank, self._size = rank, size
        limit = timedelta(seconds=LINK_UP_S)
        self._store = TCPStore(HOST, store.port, is_master=False, timeout=limit)
        more: dict[str, Any] = {"enable_reconfigure": True}
        dist.init_process_group(
            "gloo", store=PrefixStore("torch's own", self._store), rank=rank, world_size=size, timeout=limit, **more
        )

    def connect(self, generation: int) -> None:
        """Exchange handles, and connect."""
        own: Any = dist.distributed_c10d
        self._store.set(f"{generation}/{self._rank}", own._get_reconfigure_handle())
        handles = [self._store.get(f"{generation}/{rank}").decode() for rank in range(self._size)]
        own._reconfigure(generation, handles, timeout=timedelta(seconds=LINK_UP_S)).wait()


WAYS: dict[str, type[Midstep | Torch]] = {"midstep": Midstep}
if hasattr(dist.distributed_c10d, "_reconfigure"):
    WAYS["torch"] = Torch


def hold_rank(way: str, rank: int, size: int, store: Rendezvous, line: Connection) -> None:
    """Be a rank: connect when told to, and add something up. Does not return."""
    torch.set_num_threads(1)
    held = WAYS[way](rank, size, store)
    line.send(UP)
    with contextlib.suppress(EOFError, OSError):
        while True:
            generation = line.recv()
            try:
                held.connect(generation)
                ones = torch.ones(3)
                dist.all_reduce(ones)
                line.send(UP if ones.tolist() == [float(size)] * 3 else f"{ones.tolist()}")
            except Exception as error:  # of either way, and any kind
                line.send(f"{type(error).__name__}: {error}")
    os._exit(0)


class Ranks:
    """The ranks of one way."""

    def __init__(self, way: str, size: int) -> None:
        self._way, self._size, self._generation = way, size, 0
        line, theirs = _FORK.Pipe()
        self._server = _FORK.Process(target=serve_store, args=(theirs,), daemon=True)
        self._server.start()
        self._store = Rendezvous(HOST, line.recv(), "of this benchmark")
        self._ranks: dict[int, tuple[Any, Connection]] = {}
        for rank in range(size):
            self._start(rank)
        self.connect()

    def replace(self, rank: int) -> None:
        """Kill a rank, and have a fork ready in its place."""
        process, line = self._ranks.pop(rank)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        line.close()
        self._start(rank)

    def connect(self) -> float:
        """Have all connect; return how many seconds it took. Raises ClickException."""
        self._generation += 1
        began_s = time.monotonic()
        for _, line in self._ranks.values():
            line.send(self._generation)
        self._await_all(self._ranks)
        return time.monotonic() - began_s

    def close(self) -> None:
        """End all processes."""
        for process in (*(process for process, _ in self._ranks.values()), self._server):
            process.kill()
            process.join()

    def _start(self, rank: int) -> None:
        line, theirs = _FORK.Pipe()
        arguments = (self._way, rank, self._size, self._store, theirs)
        process = _FORK.Process(target=hold_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._ranks[rank] = (process, line)
        self._await_all([rank])

    def _await_all(self, ranks: Iterable[int]) -> None:
        missing: dict[Any, int] = {self._ranks[rank][1]: rank for rank in ranks}
        deadline = time.monotonic() + ANSWER_S
        while missing:
            ready: list[Any] = wait([*missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(missing.values())
                raise click.ClickException(
                    f"{self._way}: ranks {late} of {self._size} say nothing for {ANSWER_S:.0f} s"
                )
            for line in ready:
                rank, said = missing.pop(line), line.recv()
                if said != UP:
                    raise click.ClickException(f"{self._way}: rank {rank} of {self._size}: {said}")


@contextlib.contextmanager
def all_ways(size: int) -> Iterator[dict[str, Ranks]]:
    """Yield connected ranks of each way."""
    with contextlib.ExitStack() as ending:
        made = {}
        for way in WAYS:
            made[way] = Ranks(way, size)
            ending.callback(made[way].close)
        yield made


def measure(size: int, repeat: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each link-up, by way and by what happened before. Raises ClickException."""
    found: dict[str, dict[str, list[float]]] = {way: {each: [] for each in HAPPENINGS} for way in WAYS}
    with all_ways(size) as made:
        for number in range(repeat):
            for happening in HAPPENINGS:
                for way, ranks in made.items():
                    if happening == REPLACED:
                        ranks.replace(number % size)
                    found[way][happening].append(ranks.connect())
    return found


@click.command(help=__doc__)
@click.option("--ranks", default="2,4,8", show_default=True, help="Sizes of the world.")
@click.option("--repeat", default=10, show_default=True, help="Link-ups of each kind.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here.")
def main(ranks: str, repeat: int, path: Path | None) -> None:
    """Measure, print, and write."""
    table = Table(
        "ranks", "happened", *(f"{way}, ms" for way in WAYS), title=f"a link-up with torch {torch.__version__}"
    )
    result: dict[str, Any] = {"machine": figures.machine(), "link_up_s": {}}
    for size in map(int, ranks.split(",")):
        found = measure(size, repeat)
        spreads = {way: {each: figures.spread(values) for each, values in by.items()} for way, by in found.items()}
        result["link_up_s"][size] = spreads
        for happening in HAPPENINGS:
            row = (figures.text(spreads[way][happening], 1000, 1) for way in WAYS)
            table.add_row(str(size), happening, *row)
    if path is not None:
        path.write_text(json.dumps(result, indent=1))
    Console().print(table)


if __name__ == "__main__":
    main()
