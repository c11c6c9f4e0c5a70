"""Thousands of link-ups of one set of ranks, as fast as they come, with kills and aborts in between: does one crash?

    python benchmarks/link_ups.py [--link-ups 10000] [--ranks 3] [--device cpu] [--minutes 9] [--json FILE]

The communicator alone, on gloo, or with `--device npu` that of NPUs, with the device that it is on: real processes,
one store, groups that overlap. In each round all ranks are connected in a new generation and use every group. Before
it something happens to them: all are aborted, in a collective or in the midst of the last link-up; a rank is killed
there, and a process that was forked anew takes its place. A process that ends otherwise than by our hand is a crash;
what it was doing is kept. One whose device cannot be made fit again leaves, as it would in a job, and is replaced; that
is counted apart.

With --json the figures are added to those that are in the file, so a long run can be done in parts.
"""

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
import figures
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from midstep.communicators.base import Communicator
from midstep.communicators.dns import disable_dns_in_this_process
from midstep.communicators.gloo.communicator import GlooCommunicator
from midstep.devices import device_named
from midstep.devices.kinds import CPU, NPU, NPU_DEFAULTS, device_kind
from midstep.protocol.errors import MidstepError, RecoveryError
from midstep.protocol.types import Rendezvous

LINK_UP_S, COLLECTIVE_S, ANSWER_S = 20.0, 60.0, 90.0
AGAIN_S = 0.1
MOST_MIDWAY_S = 0.03  # what strikes a link-up does so within this time after it began
ABORT, KILL, ABORT_MIDWAY, KILL_MIDWAY = HAPPENINGS = ("abort", "kill", "abort in the link-up", "kill in the link-up")
CRASHES, LEFT = "crashes", "processes that left"
LEAVE_CODE = 86  # of a process whose device cannot be cleaned
UP, NOT_UP = "up", "not up"
MOST_TEXT = 20_000  # of what a crashed process has said
_FORK = multiprocessing.get_context("fork")


class Place:
    """Hold the device of a rank, and what connects it to the others."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind = kind
        self.communicator: Communicator
        if kind == CPU:
            self.communicator = GlooCommunicator()
            return
        from midstep.communicators.hccl import npu_communicator

        self._device = device_named(kind)
        self._device.prepare(rank, dict(NPU_DEFAULTS), LINK_UP_S)
        self.communicator = npu_communicator()

    def abort(self) -> None:
        """End whatever the rank waits for. Called in another thread."""
        self.communicator.abort("told so")
        if self.kind != CPU:
            self._device.stop()

    def clean(self) -> None:
        """Make the device fit for a new link-up."""
        if self.kind != CPU:
            self._device.stop()
            self._device.clean()


def hold_rank(
    rank: int, size: int, store: Rendezvous, line: Connection, traces: str, kind: str, *, newcomer: bool
) -> None:
    """Be a rank: connect when told to, then use the groups until that fails. Does not return."""
    with Path(traces, f"{rank}.{os.getpid()}").open("a") as trace:
        faulthandler.enable(trace)
        os.dup2(trace.fileno(), sys.stderr.fileno())  # where torch tells of each peer that is gone
        torch.set_num_threads(1)
        try:
            _train(rank, size, store, line, Place(kind, rank), newcomer=newcomer)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def _train(rank: int, size: int, store: Rendezvous, line: Connection, place: Place, *, newcomer: bool) -> None:
    times = {"collective_s": COLLECTIVE_S, "link_up_s": LINK_UP_S}
    communicator = place.communicator
    communicator.init(rank=rank, world_size=size, generation=0, store=None if newcomer else store, **times)
    made = [dist.new_group(members) for members in ([0, 1], list(range(1, size)), list(range(size)))]
    groups = [None, *(group for group in made if group != dist.GroupMember.NON_GROUP_MEMBER)]
    orders = _Orders(line, place.abort)
    orders.answer(UP, 0)
    while True:
        generation = orders.next_generation()
        try:
            _clean_or_leave(place)
            communicator.reconnect(generation, store, LINK_UP_S)
            for group in groups:
                ones = torch.ones(3, device=place.kind)
                dist.all_reduce(ones, group=group)
                if ones.tolist() != [float(dist.get_world_size(group))] * 3:
                    raise AssertionError(f"generation {generation}: {ones.tolist()} in a group of {group}")
        except (MidstepError, RuntimeError):
            orders.answer(NOT_UP, generation)
            continue
        os.ftruncate(sys.stderr.fileno(), 0)  # of no use now
        orders.answer(UP, generation)
        with contextlib.suppress(MidstepError, RuntimeError):
            while True:
                dist.all_reduce(ones := torch.ones(1000, device=place.kind))
                ones.cpu()


def _clean_or_leave(place: Place) -> None:
    try:
        place.clean()
    except RecoveryError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(LEAVE_CODE)


class _Orders:
    """Hears in a thread what the benchmark tells a rank, and answers; an abort is done at once."""

    def __init__(self, line: Connection, abort: Callable[[], None]) -> None:
        self._line = line
        self._abort = abort
        self._generation: int | None = None
        self._told = threading.Condition()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def answer(self, word: str, generation: int) -> None:
        """Tell the benchmark."""
        with self._sending:
            self._line.send((word, generation))

    def next_generation(self) -> int:
        """Wait for the order to connect."""
        with self._told:
            while self._generation is None:
                self._told.wait()
            generation, self._generation = self._generation, None
            self._told.notify_all()
            return generation

    def _listen(self) -> None:
        try:
            while True:
                order = self._line.recv()
                if order == ABORT:
                    self._abort()
                    self.answer(ABORT, 0)
                else:
                    self._connect(order)
        except (EOFError, OSError):
            os._exit(0)

    def _connect(self, generation: int) -> None:
        """Have the train thread connect. An abort that came just before it began to connect has not been felt."""
        with self._told:
            self._generation = generation
            self._told.notify_all()
            while self._generation is not None and not self._told.wait(AGAIN_S):
                self._abort()


class Soak:
    """The ranks, as the benchmark sees them, and what has happened to them."""

    def __init__(self, size: int, seed: int, traces: Path, kind: str) -> None:
        """Start a store and all ranks. This process computes nothing, so that it can fork."""
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []
        self._size, self._dice, self._traces, self._kind = size, random.Random(seed), traces, kind
        if kind != CPU:
            prepare_process(kind)
        line, theirs = _FORK.Pipe()
        self._store_process = _FORK.Process(target=serve_store, args=(theirs,), daemon=True)
        self._store_process.start()
        self._store = Rendezvous("127.0.0.1", line.recv(), "of this soak")
        self._ranks: dict[int, tuple[Any, Connection]] = {}
        self._generation = 0
        for rank in range(size):
            self._start(rank, newcomer=False)
        self._answers(range(size), {(UP, 0)})

    def round(self) -> None:
        """Have something happen to the ranks, and connect all of them again; as often as that does not succeed."""
        happening = self._dice.choice(HAPPENINGS)
        self.counts[happening] += 1
        if happening in {ABORT_MIDWAY, KILL_MIDWAY}:
            self._abort()
            self._connect()
            time.sleep(self._dice.uniform(0, MOST_MIDWAY_S))
        if happening in {KILL, KILL_MIDWAY}:
            self._kill(self._dice.randrange(self._size))
        self._abort()
        while not self._up():
            self.counts["link-ups that failed"] += 1
            self._abort()
        self.counts["link-ups"] += 1

    def close(self) -> None:
        """End all processes."""
        for process, line in self._ranks.values():
            process.kill()
            process.join()
            line.close()
        self._store_process.kill()
        self._store_process.join()

    def _start(self, rank: int, *, newcomer: bool) -> None:
        line, theirs = _FORK.Pipe()
        others = [other for _, other in self._ranks.values()]
        arguments = (rank, self._size, self._store, theirs, str(self._traces), self._kind)
        process = _FORK.Process(target=_begin, args=(others, *arguments), kwargs={"newcomer": newcomer}, daemon=True)
        process.start()
        theirs.close()
        self._ranks[rank] = (process, line)

    def _kill(self, rank: int) -> None:
        process, line = self._ranks.pop(rank)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        line.close()
        if process.exitcode != -signal.SIGKILL:
            self._crashed(rank, process)
        self._start(rank, newcomer=True)
        self._answers([rank], {(UP, 0)})

    def _crashed(self, rank: int, process: Any) -> None:
        if process.exitcode == LEAVE_CODE:
            self.counts[LEFT] += 1
            return
        self.counts[CRASHES] += 1
        trace = (self._traces / f"{rank}.{process.pid}").read_text()[-MOST_TEXT:]
        self.found.append(f"rank {rank} ended with {process.exitcode} in generation {self._generation}\n{trace}")

    def _replace_crashed(self) -> None:
        for rank, (process, line) in list(self._ranks.items()):
            if process.exitcode is None:
                continue
            line.close()
            del self._ranks[rank]
            self._crashed(rank, process)
            self._start(rank, newcomer=True)
            self._answers([rank], {(UP, 0)})

    def _say(self, order: Any) -> None:
        for _, line in self._ranks.values():
            with contextlib.suppress(OSError):
                line.send(order)

    def _abort(self) -> None:
        """Abort all ranks, and wait until all have heard it; answers of what was under way are dropped."""
        self._replace_crashed()
        self._say(ABORT)
        self._answers(self._ranks, {(ABORT, 0)})

    def _connect(self) -> None:
        self._generation += 1
        self._say(self._generation)

    def _up(self) -> bool:
        self._connect()
        answers = self._answers(self._ranks, {(UP, self._generation), (NOT_UP, self._generation)})
        return len(answers) == self._size and all(word == UP for word in answers.values())

    def _answers(self, ranks: Iterable[int], wanted: set[tuple[str, int]]) -> dict[int, str]:
        """Return the answer of each rank that lives, which is one of `wanted`. Raises ClickException without one."""
        found: dict[int, str] = {}
        missing = {rank: self._ranks[rank] for rank in ranks}
        deadline = time.monotonic() + ANSWER_S
        while missing:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise click.ClickException(f"ranks {sorted(missing)} said nothing for {ANSWER_S:.0f} s")
            ready = wait([line for _, line in missing.values()], left_s)
            for rank, (_, line) in list(missing.items()):
                if line not in ready:
                    continue
                try:
                    answer = line.recv()
                except (EOFError, OSError):  # crashed: the next round notices
                    del missing[rank]
                    continue
                if answer in wanted:
                    found[rank] = answer[0]
                    del missing[rank]
        return found


def prepare_process(kind: str) -> None:
    """Have what ranks on NPUs need in each process that is forked: the variables of a rank, and torch-npu imported.

    Without the variables its watchdog ends the ranks that wait for longer than a collective may take, as for a newcomer
    on a busy machine. No device is touched.
    """
    for name, value in device_kind(kind).environment.items():
        os.environ.setdefault(name, value)
    for name in ("torch_npu", "midstep.communicators.hccl"):
        importlib.import_module(name)


def _begin(others: list[Connection], *arguments: Any, newcomer: bool) -> None:
    for line in others:
        line.close()
    hold_rank(*arguments, newcomer=newcomer)


def serve_store(line: Connection) -> None:
    """Be the process that has the store of the ranks, and say its port."""
    disable_dns_in_this_process()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line.send(store.port)
    signal.pause()


@click.command(help=__doc__)
@click.option("--link-ups", "wanted", default=10_000, show_default=True, help="Rounds, those in the file counted in.")
@click.option("--ranks", default=3, show_default=True, type=click.IntRange(min=3), help="Size of the world.")
@click.option("--device", "kind", type=click.Choice([CPU, NPU]), default=CPU, show_default=True, help="What they use.")
@click.option("--minutes", default=9.0, show_default=True, help="End after this time at the latest.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Add the figures to those in FILE.")
def main(wanted: int, ranks: int, kind: str, minutes: float, path: Path | None) -> None:
    """Run rounds; print what happened, and exit with status 1 if a process crashed."""
    before: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    total, crashed = Counter(before.get("counts", {})), list(before.get("crashes", ()))
    began_s = time.monotonic()
    disable_dns_in_this_process()
    with tempfile.TemporaryDirectory(prefix="midstep-link-ups-") as traces:
        soak = Soak(ranks, seed=sum(total.values()), traces=Path(traces), kind=kind)
        try:
            while total["link-ups"] + soak.counts["link-ups"] < wanted and time.monotonic() - began_s < 60 * minutes:
                soak.round()
        finally:
            soak.close()
    total += soak.counts
    seconds = before.get("seconds", 0.0) + time.monotonic() - began_s
    crashed += soak.found
    for name, number in sorted(total.items()):
        print(f"{number:>8} {name}")
    print(f"{total['link-ups']} link-ups of {ranks} ranks in {seconds:.0f} s, {total[CRASHES]} crashes")
    print(*crashed, sep="\n")
    if path is not None:
        result = {"machine": figures.machine(), "ranks": ranks, "seconds": seconds, "counts": total, "crashes": crashed}
        path.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(1 if total[CRASHES] else 0)


if __name__ == "__main__":
    main()
