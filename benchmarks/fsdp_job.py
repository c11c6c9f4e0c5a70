"""The job that `fsdp.py` measures: a GPT whose parameters are sharded, or replicated by DDP, at one size for each rank.

One script for both: resilient under `midstep run`, plain under torchrun. `fsdp_job.py NOTES STEPS KILLED_STEP MESH
BYTES`. `MESH`: `ddp`, or columns (`2`), or rows and columns (`2x2`); `BYTES`: parameters and Adam's state of a rank.
"""

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.benchmarks.records import BUSY, WARM_UP_STEPS, Recorder, kill_once
from midstep.examples.gpt import GPT, VOCABULARY, Shape

DDP = "ddp"  # as `fsdp.py` has it, which this would import with more than it needs
BYTES_OF_A_PARAMETER = 12  # with Adam's two moments, in fp32
LAYERS, HEADS = 6, 8
RANK, VICTIM = int(os.environ["RANK"]), 1


def shape_of(mesh: str, size_bytes: int) -> Shape:
    """Return the model of which each rank holds about so many bytes. A layer has 12 times its width squared."""
    columns = 1 if mesh == DDP else int(mesh.rsplit("x", maxsplit=1)[-1])
    width = (size_bytes * columns / BYTES_OF_A_PARAMETER / (12 * LAYERS)) ** 0.5
    return Shape(layers=LAYERS, heads=HEADS, width=max(1, round(width / HEADS)) * HEADS, dropout=0.0)


def build(mesh: str, shape: Shape) -> Any:
    """Make the model. Neither way of building is spared its initial values."""
    torch.manual_seed(1)
    model: Any = GPT(shape)
    if mesh == DDP:
        return DistributedDataParallel(model)
    sizes = tuple(map(int, mesh.split("x")))
    on = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for block in model.blocks:
        fully_shard(block, mesh=on)
    return fully_shard(model, mesh=on)


def batch(step: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's one sequence of a step."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    window = torch.randint(VOCABULARY, (1, shape.context + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


def busy_s() -> float:
    """Return how long all cores of this machine together have worked so far."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)  # what guests use is in the others


def main(directory: Path, total: int, killed_step: int, mesh: str, size_bytes: int) -> None:
    """Train, and note when each step was done. A negative `killed_step`: no rank is killed."""
    torch.set_num_threads(1)
    recorder = Recorder(directory, RANK)
    recorder.mark("process")
    shape = shape_of(mesh, size_bytes)
    midstep.init_process_group("gloo")  # torch's own under torchrun
    recorder.mark("group")
    model = build(mesh, shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    state = midstep.TrainState(model=model, optimizer=optimizer)
    recorder.mark("model and optimizer")

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(total):
            optimizer.zero_grad()
            loss = model(*batch(step.index, shape))
            if step.index == killed_step and RANK == VICTIM:
                kill_once(directory)
            loss.backward()
            with step.update():
                optimizer.step()
            recorder.step(step.index)
            if RANK == 0 and step.index in (WARM_UP_STEPS - 1, total - 1):
                recorder.note(BUSY, busy_s())

    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
