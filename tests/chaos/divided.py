"""A training whose samples are divided among the ranks, and which says which of them it has learned from.

Runs under `midstep run`: `divided.py RECORDS STEPS STEP_S`. A file `gate.<step>` among the records holds all ranks in
front of that step for as long as it is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import midstep
from midstep.processor.data import ResumableBatches

SAMPLES = 2000
BATCH = 2


def dataset() -> TensorDataset:
    """Return samples that are their own numbers."""
    return TensorDataset(torch.arange(SAMPLES))


def train(records: Path, steps: int, step_s: float) -> None:
    """Train, and append `step: sample sample` to this rank's record for each step that is committed."""
    midstep.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    module = torch.nn.Linear(1, 1)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = dataset()
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, shuffle=True, seed=5)
    batches = ResumableBatches(DataLoader(data, batch_size=BATCH, sampler=sampler))
    state = midstep.TrainState(model=model, optimizer=optimizer, data=batches)

    @midstep.resilient(state)
    def loop() -> None:
        stream = batches.endless()
        for step in state.steps(steps):
            while (records / f"gate.{step.index}").exists():
                time.sleep(0.02)
            (samples,) = next(stream)
            optimizer.zero_grad()
            (model(samples[:, None].float()) * torch.rand(1)).sum().backward()
            time.sleep(step_s)
            with step.update():
                optimizer.step()
            with (records / f"samples.{rank}").open("a") as record:
                record.write(f"{step.index}: {' '.join(map(str, samples.tolist()))}\n")

    loop()
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size())
    (records / f"size.{rank}").write_text(str(dist.get_world_size()))
    (records / f"weights.{rank}").write_text(" ".join(float(each).hex() for each in module.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
