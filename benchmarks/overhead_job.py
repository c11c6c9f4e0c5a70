"""The job that `overhead.py` measures: plain and resilient steps by turns in the same processes.

Three equal models are trained side by side. Two are plain DDP, each over a gloo group of torch's own; the third is
resilient, over midstep's group, with commit barrier and own states. Whatever disturbs the machine disturbs all alike,
and how far the two plain ones differ says how much a difference means. Each step takes them in another order, each
repetition builds them in another order, as neither who comes first nor whose memory lies where may decide.
"""

import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from midstep.benchmarks.recovery_job import batch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.examples.gpt import GPT, TEN_MILLION
from midstep.processor.runtime import Runtime

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIMIT = timedelta(seconds=60)
PLAIN, CONTROL, RESILIENT = KINDS = ("plain", "control", "resilient")
ORDERS = tuple(itertools.permutations(KINDS))


class Clocks:
    """Sums up, step by step, what single functions take."""

    def __init__(self) -> None:
        self._now: defaultdict[str, float] = defaultdict(float)

    def watch(self, name: str, owner: Any, *methods: str) -> None:
        """Time these methods of an object from now on, under one name."""
        for method in methods:
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def take(self) -> dict[str, float]:
        """Return the sums of the step that is over, in seconds, and begin anew."""
        sums, self._now = dict(self._now), defaultdict(float)
        return sums

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._now[name] += time.perf_counter() - began_s

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


def watched(state: midstep.TrainState, runtime: Runtime) -> Clocks:
    """Time the parts of a resilient step from now on."""
    clocks = Clocks()
    clocks.watch("capture of the own state", state, "capture_own")
    clocks.watch("own state to the black box", runtime.own_states, "keep")
    clocks.watch("own states swapped", runtime.own_states, "swap")
    clocks.watch("commit barrier", runtime.communicator, "barrier")
    clocks.watch("step clock", runtime.step_clock, "begin_step", "committed", "doing", "entered", "left")
    return clocks


def now() -> tuple[float, float]:
    """Read two clocks: seconds, and seconds that this process has computed."""
    return time.perf_counter(), time.process_time()


def lasted(kind: str, *spans: tuple[tuple[float, float], tuple[float, float]]) -> dict[str, float]:
    """Sum up spans between readings of the two clocks."""
    return {
        f"{kind}_s": sum(end[0] - begin[0] for begin, end in spans),
        f"{kind}_cpu_s": sum(end[1] - begin[1] for begin, end in spans),
    }


def main() -> None:
    """Take the folder for the notes, the number of steps and the repetition; leave the times of every step."""
    directory, total, repetition = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    midstep.init_process_group()
    trained = {
        kind: build(None if kind == RESILIENT else plain_group(kind)) for kind in ORDERS[repetition % len(ORDERS)]
    }
    model, optimizer = trained[RESILIENT]
    state = midstep.TrainState(model=model, optimizer=optimizer)
    runtime = Runtime.current()
    assert runtime is not None
    clocks = watched(state, runtime)
    notes = []

    @midstep.resilient(state)
    def train() -> None:
        left = now()
        for step in state.steps(total):
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
