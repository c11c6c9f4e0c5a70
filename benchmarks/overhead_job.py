"""The job that `overhead.py` measures: plain and resilient steps by turns in the same processes.

Three equal models are trained side by side. Two are plain DDP, each over a gloo group of torch's own; the third is
resilient, over midstep's group, with commit barrier and local states. Whatever disturbs the machine disturbs all alike,
and how far the two plain ones differ says how much a difference means. Each step takes them in another order, each
repetition builds them in another order, as neither who comes first nor whose memory lies where may decide.

The parts are timed in steps of their own, behind the others: a clock around a part costs, too.
"""

import ctypes
import itertools
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.benchmarks.recovery_job import batch
from midstep.communicators.gloo.work import GroupWork
from midstep.examples.gpt import GPT, TEN_MILLION
from midstep.processor.runtime import Runtime

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIMIT = timedelta(seconds=60)
PLAIN, CONTROL, RESILIENT = KINDS = ("plain", "control", "resilient")
ORDERS = tuple(itertools.permutations(KINDS))
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers for mallopt
_MOST_MAPPED_BYTES = 32 * 1024 * 1024  # the most that glibc takes


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, for all three models alike.

    Else it hands the optimizer's temporary tensors back to the kernel in some steps and not in others, as its heap
    happens to lie: up to 13,000 page faults a step, more than what is to be measured.
    """
    libc = ctypes.CDLL(None)
    kept = libc.mallopt(_MMAP_THRESHOLD, _MOST_MAPPED_BYTES), libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    assert all(kept), "this C library has no such setting"


class Reading(NamedTuple):
    """The resources that a process has used up."""

    s: float
    cpu_s: float
    train_cpu_s: float  # of that the thread that trains
    waits: float  # times that a thread gave its core away
    preemptions: float  # times that it was taken
    page_faults: float


class Clocks:
    """Sums up, step by step, what single functions take, in seconds and in seconds of their thread's computing."""

    def __init__(self) -> None:
        self._now: defaultdict[str, float] = defaultdict(float)

    def watch(self, name: str, owner: Any, *methods: str) -> None:
        """Time these methods of an object from now on, under one name."""
        for method in methods:
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def take(self) -> dict[str, float]:
        """Return the sums of the step that is over, in seconds, and begin again."""
        sums, self._now = dict(self._now), defaultdict(float)
        return sums

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._now[f"{name}/cpu"] += time.thread_time() - began_cpu_s
                self._now[f"{name}/wall"] += time.perf_counter() - began_s

        return timed


def plain_group(kind: str) -> dist.ProcessGroup:
    """Connect a gloo group as torch itself has it, beside midstep's."""
    store = PrefixStore(kind, TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False))
    group = dist.ProcessGroup(store, RANK, WORLD_SIZE)
    gloo = dist.ProcessGroupGloo(store, RANK, WORLD_SIZE, LIMIT)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def build(group: dist.ProcessGroup | None) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Make a model over `group`, None being midstep's, and its optimizer."""
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(TEN_MILLION), process_group=group)
    return model, torch.optim.Adam(model.parameters(), lr=3e-4)


def backward(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> None:
    """Compute a step's gradients."""
    optimizer.zero_grad()
    model(*data).backward()


def watch(clocks: Clocks, state: midstep.TrainState, runtime: Runtime) -> None:
    """Time the parts of a resilient step from now on."""
    assert dist.group.WORLD is not None
    clocks.watch("all-reduces started, with gloo's own part", dist.group.WORLD, "allreduce")
    clocks.watch("futures of all-reduces", GroupWork, "get_future")
    clocks.watch("all-reduces done, in gloo's threads", GroupWork, "_completed")
    clocks.watch("capture of the rank-local state", state, "capture_local")
    clocks.watch("rank-local state to the black box", runtime.local_states, "keep")
    clocks.watch("rank-local states swapped", runtime.local_states, "swap")
    clocks.watch("commit barrier", runtime.communicator, "barrier")
    clocks.watch("step clock between collectives", runtime.step_clock, "begin_step", "doing")


def now() -> Reading:
    """Read all clocks of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Reading(
        time.perf_counter(), time.process_time(), time.thread_time(), used.ru_nvcsw, used.ru_nivcsw, used.ru_minflt
    )


def lasted(kind: str, *spans: tuple[Reading, Reading]) -> dict[str, float]:
    """Sum up spans between readings."""
    return {
        f"{kind}_{name}": sum(getattr(end, name) - getattr(begin, name) for begin, end in spans)
        for name in Reading._fields
    }


def main() -> None:
    """Take the folder for the notes, the numbers of steps and of those with timed parts, and the repetition.

    Leave what every step took.
    """
    directory, paired, in_parts, repetition = Path(sys.argv[1]), *map(int, sys.argv[2:])
    keep_freed_memory()
    midstep.init_process_group()
    trained = {
        kind: build(None if kind == RESILIENT else plain_group(kind)) for kind in ORDERS[repetition % len(ORDERS)]
    }
    model, optimizer = trained[RESILIENT]
    state = midstep.TrainState(model=model, optimizer=optimizer)
    runtime = Runtime.current()
    assert runtime is not None
    clocks = Clocks()
    notes = []

    @midstep.resilient(state)
    def train() -> None:
        left = now()
        for step in state.steps(paired + in_parts):
            if step.index == paired:
                watch(clocks, state, runtime)
            # The way from one step to the next, through `steps`, belongs to the resilient one.
            note: dict[str, Any] = {}
            between = (left, now())
            data = batch(step.index)
            for kind in ORDERS[step.index % len(ORDERS)]:
                began = now()
                backward(*trained[kind], data)
                if kind == RESILIENT:
                    with step.update():
                        optimizer.step()
                else:
                    trained[kind][1].step()
                spans = ((began, now()), between) if kind == RESILIENT else ((began, now()),)
                note |= lasted(kind, *spans)
            notes.append({**note, "parts": clocks.take()})
            left = now()

    train()
    (directory / f"rank-{RANK}.json").write_text(json.dumps(notes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
