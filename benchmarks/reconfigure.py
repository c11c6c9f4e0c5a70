"""Measure how long gloo's groups take to be linked again after a fault of a rank: midstep's way, and torch's own.

torch 2.14 and newer can give a group other members (`enable_reconfigure`). In each trial all ranks but the last wait in
a sum for the one that is killed. A moment later they are told, as by a controller: they end the collective, and link up
with a process that takes its place and was waiting. `left`: until every survivor has left the collective. `linked`:
until the sum of all is right again. Seconds from the fault, medians.

With `--groups N` each rank has so many groups, as models with several kinds of parallelism have.
"""

import json
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import click
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from midstep.benchmarks import figures
from midstep.communicators.dns import disable_dns_in_this_process
from midstep.communicators.gloo.communicator import GlooCommunicator
from midstep.protocol.types import Rendezvous

FIRST, NEXT = 1, 2
MOST_GROUPS = 1000
LIMIT_S = 60.0
TOLD_S = 0.01  # from the kill until the survivors hear of it
SETTLED_S = 0.3  # until all are in the collective
_FORK = multiprocessing.get_context("fork")


class Links(Protocol):
    """The groups of a rank, whichever way they are made."""

    def link(self, generation: int, hear: Callable[[], Any], say: Callable[[Any], None]) -> None:
        """Link up with the ranks of a generation."""

    def add_up(self) -> float:
        """Return the sum of ones, in the last group."""

    def abort(self) -> None:
        """End the collective that another thread is in."""


class OfMidstep:
    """midstep's communicator: its groups are torch's default group, and others of all ranks."""

    def __init__(self, rank: int, ranks: int, groups: int, store: Rendezvous) -> None:
        self._communicator, self._store = GlooCommunicator(), store
        self._given = (rank, ranks, groups)
        self._made = False

    def link(self, generation: int, hear: Callable[[], Any], say: Callable[[Any], None]) -> None:
        """Link up."""
        rank, ranks, groups = self._given
        if not self._made:
            self._communicator.init(
                rank=rank, world_size=ranks, generation=0, store=None, collective_s=LIMIT_S, link_up_s=LIMIT_S
            )
            for _ in range(groups - 1):
                dist.new_group(list(range(ranks)))
            self._made = True
        self._communicator.reconnect(generation, self._store, LIMIT_S)

    def add_up(self) -> float:
        """Return the sum."""
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones.item())

    def abort(self) -> None:
        """End it."""
        self._communicator.abort("a rank is gone")


class OfTorch:
    """torch's groups with `enable_reconfigure`, whose handles the ranks tell each other by way of the benchmark."""

    def __init__(self, rank: int, ranks: int, groups: int, store: Rendezvous) -> None:
        timeout = timedelta(seconds=LIMIT_S)
        made: Any = dist.ProcessGroupGloo
        shared = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._groups = [made(shared, rank, ranks, timeout=timeout, enable_reconfigure=True) for _ in range(groups)]
        self._trial = int(store.secret, 16) << 16

    def link(self, generation: int, hear: Callable[[], Any], say: Callable[[Any], None]) -> None:
        """Tell the handles, hear those of all, and take them."""
        say([group.get_reconfigure_handle() for group in self._groups])
        handles_of_all = hear()
        for number, group in enumerate(self._groups):
            options: Any = dist.distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]
            options.uuid = self._trial + generation * MOST_GROUPS + number
            options.handles = [handles[number] for handles in handles_of_all]
            options.timeout = timedelta(seconds=LIMIT_S)
            group.reconfigure(options).wait()

    def add_up(self) -> float:
        """Return the sum."""
        ones = torch.ones(1)
        self._groups[0].allreduce([ones]).wait()
        return float(ones.item())

    def abort(self) -> None:
        """End it."""
        for group in self._groups:
            group.abort()


FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
WAYS: dict[str, type[OfMidstep] | type[OfTorch]] = {"midstep": OfMidstep, "torch": OfTorch}


def be_rank(way: str, given: tuple[int, int, int, Rendezvous], line: Connection) -> None:
    """Live as one rank; a new process begins with the second generation."""
    torch.set_num_threads(1)

    def hear() -> Any:
        if not line.poll(LIMIT_S):
            raise TimeoutError("the benchmark has said nothing")
        return line.recv()

    rank, ranks = given[0], given[1]
    try:
        links: Links = WAYS[way](*given)
        generation = hear()
        links.link(generation, hear, line.send)
        assert links.add_up() == ranks
        line.send(time.monotonic())
        if generation == FIRST:
            left: list[float] = []
            thread = threading.Thread(target=_wait_in_a_sum, args=(links, left, rank == ranks - 1), daemon=True)
            thread.start()
            generation = hear()
            links.abort()
            thread.join(LIMIT_S)
            line.send(left[0])
            links.link(generation, hear, line.send)
            assert links.add_up() == ranks
            line.send(time.monotonic())
        hear()
    except BaseException as error:
        line.send(f"rank {rank}: {type(error).__name__}: {error}")
    os._exit(0)


def _wait_in_a_sum(links: Links, left: list[float], sleeps: bool) -> None:
    if sleeps:
        time.sleep(LIMIT_S)
    try:
        links.add_up()
    except Exception:
        left.append(time.monotonic())


class Trial:
    """The ranks of one trial."""

    def __init__(self, way: str, ranks: int, groups: int, port: int, fault: signal.Signals) -> None:
        self._way, self._ranks, self._groups, self._fault = way, ranks, groups, fault
        self._store = Rendezvous("127.0.0.1", port, secrets.token_hex(4))
        self._processes: list[Any] = []
        self._lines: list[Connection] = []

    def run(self) -> tuple[float, float]:
        """Return until when all survivors had left the sum, and until when all were linked. Raises ClickException."""
        try:
            for rank in range(self._ranks):
                self._start(rank)
            self._link(FIRST)
            time.sleep(SETTLED_S)
            victim = self._ranks - 1
            newcomer, line = self._fork(victim)
            os.kill(self._processes[victim].pid, self._fault)
            killed_s = time.monotonic()
            time.sleep(TOLD_S)
            for survivor in self._lines[:victim]:
                survivor.send(NEXT)
            line.send(NEXT)
            left_s = max(self._hear(survivor) for survivor in self._lines[:victim])
            self._processes.append(newcomer)
            self._lines[victim].close()
            self._lines[victim] = line
            return left_s - killed_s, self._linked() - killed_s
        finally:
            for process in self._processes:
                process.kill()
                process.join()
            for each in self._lines:
                each.close()

    def _start(self, rank: int) -> None:
        process, line = self._fork(rank)
        self._processes.append(process)
        self._lines.append(line)

    def _fork(self, rank: int) -> tuple[Any, Connection]:
        ours, theirs = _FORK.Pipe()
        given = (rank, self._ranks, self._groups, self._store)
        process = _FORK.Process(target=be_rank, args=(self._way, given, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _link(self, generation: int) -> None:
        for line in self._lines:
            line.send(generation)
        self._linked()

    def _linked(self) -> float:
        """Hand on what the ranks tell each other, if they do; return when the last of them was linked."""
        if self._way == "torch":
            told = [self._hear(line) for line in self._lines]
            for line in self._lines:
                line.send(told)
        return max(float(self._hear(line)) for line in self._lines)

    def _hear(self, line: Connection) -> Any:
        if not line.poll(2 * LIMIT_S):
            raise click.ClickException(f"{self._way}: a rank says nothing")
        said = line.recv()
        if isinstance(said, str):
            raise click.ClickException(f"{self._way}: {said}")
        return said


def measure(ranks: int, groups: int, repeat: int, fault: str) -> dict[str, Any]:
    """Run both by turns."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(repeat):
        for way, trials in found.items():
            trials.append(Trial(way, ranks, groups, store.port, FAULTS[fault]).run())
    return {
        "ranks": ranks,
        "groups": groups,
        "fault": fault,
        **{
            way: {
                name: figures.spread([trial[place] for trial in trials])
                for place, name in enumerate(("left", "linked"))
            }
            for way, trials in found.items()
        },
    }


@click.command(help=__doc__)
@click.option("--ranks", "sizes", default="2,4", show_default=True, help="Sizes of the world.")
@click.option("--groups", default=1, show_default=True)
@click.option("--fault", type=click.Choice(list(FAULTS)), default="kill", show_default=True)
@click.option("--repeat", default=5, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here.")
def main(sizes: str, *, groups: int, fault: str, repeat: int, path: Path | None) -> None:
    """Measure all sizes; print a line for each, and write JSON where it is asked for."""
    disable_dns_in_this_process()
    if not hasattr(dist.distributed_c10d, "ReconfigureOptions"):
        raise click.ClickException(f"torch {torch.__version__} cannot give a group other members; 2.14 can")
    rows = []
    for size in map(int, sizes.split(",")):
        rows.append(row := measure(size, groups, repeat, fault))
        for way in WAYS:
            left, linked = (figures.text(row[way][name]) for name in ("left", "linked"))
            click.echo(f"{size} ranks, {groups} groups, {way}: left after {left} s, linked after {linked} s")
    if path is not None:
        path.write_text(json.dumps({"machine": figures.machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
