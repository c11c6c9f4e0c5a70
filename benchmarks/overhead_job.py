"""The job that `overhead.py` measures: plain and resilient steps by turns in the same processes.

Two equal models are trained side by side. One is plain DDP over a gloo group of torch's own; the other is resilient,
over midstep's group, with commit barrier and own states. Whatever disturbs the machine disturbs both alike.
"""

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


def plain_group() -> dist.ProcessGroup:
    """Connect a gloo group as torch itself has it, beside midstep's."""
    store = PrefixStore(
        "benchmark", TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    )
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


def lasted(name: str, *spans: tuple[tuple[float, float], tuple[float, float]]) -> dict[str, float]:
    """Sum up spans between readings of two clocks: seconds that went by, seconds that this process computed."""
    return {
        f"{name}_s": sum(end[0] - begin[0] for begin, end in spans),
        f"{name}_cpu_s": sum(end[1] - begin[1] for begin, end in spans),
    }


def main() -> None:
    """Take the folder for the notes and the number of steps of each kind; leave the times of every step."""
    directory, total = Path(sys.argv[1]), int(sys.argv[2])
    midstep.init_process_group()
    model, optimizer = build(None)
    plain_model, plain_optimizer = build(plain_group())
    state = midstep.TrainState(model=model, optimizer=optimizer)
    runtime, clocks = Runtime.current(), Clocks()
    assert runtime is not None
    clocks.watch("capture of the own state", state, "capture_own")
    clocks.watch("own state to the black box", runtime.own_states, "keep")
    clocks.watch("own states swapped", runtime.own_states, "swap")
    clocks.watch("commit barrier", runtime.communicator, "barrier")
    clocks.watch("step clock", runtime.step_clock, "begin_step", "committed", "doing", "entered", "left")
    notes = []

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def plain_step(data: tuple[Tensor, Tensor]) -> None:
        backward(plain_model, plain_optimizer, data)
        plain_optimizer.step()

    @midstep.resilient(state)
    def train() -> None:
        left = now()
        for step in state.steps(total):
            began = now()
            data = batch(step.index)
            plain_first = step.index % 2 == 0
            if plain_first:
                plain_step(data)
            middle = now()
            backward(model, optimizer, data)
            with step.update():
                optimizer.step()
            parts = clocks.take()
            after = now()
            if not plain_first:
                plain_step(data)
            ended = now()
            plain = (began, middle) if plain_first else (after, ended)
            # The way from one step to the next, through `steps`, belongs to the resilient one.
            notes.append(
                {**lasted("plain", plain), **lasted("resilient", (left, began), (middle, after)), "parts": parts}
            )
            left = now()

    train()
    (directory / f"rank-{RANK}.json").write_text(json.dumps(notes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
