"""The training that is hurt in these tests: small and fast, with everything in it that is hard to bring back.

Dropout and augmentation draw from all three random generators, BatchNorm changes its statistics in the forward pass,
DDP has several buckets, and a scheduler, a data position and a running value change with every step. Each rank writes
down its losses as exact bits with a digest of its parameters, and at the end a digest of everything.

Runs under `midstep run`: `training.py RECORDS STEPS STEP_S [FILE_LIMIT_BYTES]`. A file `gate.<step>` among the records
holds all ranks in front of that step for as long as it is there.
"""

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import midstep
from midstep.processor.data import ResumableBatches

WIDTH = 64
SAMPLES = 96
BATCH = 8
Tensors = Mapping[str, torch.Tensor]


def build_model() -> torch.nn.Module:
    """Return the model with its initial parameters, which are the same everywhere."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(16, WIDTH),
        torch.nn.BatchNorm1d(WIDTH),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(WIDTH, 4),
    )


def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the model."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def build_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the scheduler of the optimizer."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)


def digest(tensors: Tensors) -> str:
    """Return a hash of all tensors, bit for bit."""
    hashed = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode())
        hashed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state as named tensors."""
    return {
        f"{index}.{name}": value
        for index, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
    }


def augmented(samples: torch.Tensor) -> torch.Tensor:
    """Shift and scale a batch by numbers from Python's and numpy's generators."""
    return samples * random.uniform(0.9, 1.1) + float(np.random.normal(0.0, 0.01))


def train(
    records: Path,
    steps: int,
    step_s: float,
    *,
    lifecycle: midstep.Lifecycle | None = None,
    augment: Callable[[torch.Tensor], torch.Tensor] = augmented,
) -> None:
    """Train for `steps` steps of at least `step_s` and write this rank's record."""
    midstep.init_process_group()
    rank = dist.get_rank()
    module = build_model()
    model = DistributedDataParallel(module, bucket_cap_mb=0.005)
    optimizer = build_optimizer(module)
    scheduler = build_scheduler(optimizer)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randint(0, 4, (SAMPLES,)))
    batches = ResumableBatches(DataLoader(data, batch_size=BATCH, shuffle=True), seed=rank)
    running = {"loss": 0.0}
    state = midstep.TrainState(
        model=model, optimizer=optimizer, scheduler=scheduler, data=batches, values={"running": running}
    )

    @midstep.resilient(state, lifecycle=lifecycle)
    def loop() -> None:
        stream = batches.endless()
        for step in state.steps(steps):
            while (records / f"gate.{step.index}").exists():
                time.sleep(0.02)
            began_s = time.monotonic()
            samples, labels = next(stream)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(augment(samples)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            running["loss"] = 0.9 * running["loss"] + 0.1 * loss.item()
            time.sleep(max(0.0, step_s - (time.monotonic() - began_s)))
            step.report(loss=loss)
            with step.update():
                optimizer.step()
                scheduler.step()
            with (records / f"steps.{rank}").open("a") as record:
                record.write(f"{step.index} {float(loss.item()).hex()} {digest(dict(module.named_parameters()))}\n")

    loop()
    random_numbers = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(random.getstate()[1]),
        "numpy": torch.from_numpy(np.random.get_state(legacy=False)["state"]["key"].astype(np.int64)),
    }
    end = {
        "parameters": digest(dict(module.named_parameters())),
        "buffers": digest(dict(module.named_buffers())),
        "optimizer": digest(optimizer_tensors(optimizer)),
        "scheduler": [scheduler.last_epoch, *(float(rate).hex() for rate in scheduler.get_last_lr())],
        "random numbers": digest(random_numbers),
        "data": batches.state_dict(),
        "running": running["loss"].hex(),
        "pid": os.getpid(),
    }
    (records / f"end.{rank}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 4:
        limit_bytes = int(sys.argv[4])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
