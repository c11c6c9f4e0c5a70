"""A training whose steps can be repeated by other ranks: it takes its batches by `step.inputs`.

Each rank has data of its own, dropout, batch norm and a running value; otherwise as `training.py`. No layer drops what
comes out of the one in the middle, so that whatever flips there changes the gradients. With `changing` as
the fourth argument something of its forward pass does not repeat itself; with `drifting` the parameters of the ranks
become different in each update.

`audited.py RECORDS STEPS STEP_S [changing|drifting]`
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from training import (  # type: ignore[import-not-found]
    BATCH,
    SAMPLES,
    WIDTH,
    augmented,
    build_optimizer,
    digest,
    optimizer_tensors,
)

import midstep
from midstep.processor.data import ResumableBatches


def build_model() -> torch.nn.Module:
    """Return the model with its initial parameters, which are the same everywhere."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(16, WIDTH),
        torch.nn.BatchNorm1d(WIDTH),
        torch.nn.GELU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(WIDTH, 4),
    )


def train(records: Path, steps: int, step_s: float, fault: str) -> None:
    """Train, and write down how this rank ended."""
    midstep.init_process_group()
    rank = dist.get_rank()
    module = build_model()
    model = DistributedDataParallel(module, bucket_cap_mb=0.005)
    optimizer = build_optimizer(module)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randint(0, 4, (SAMPLES,)))
    batches = ResumableBatches(DataLoader(data, batch_size=BATCH, shuffle=True), seed=rank)
    running = {"loss": 0.0}
    state = midstep.TrainState(model=model, optimizer=optimizer, data=batches, values={"running": running})

    @midstep.resilient(state)
    def loop() -> None:
        stream = batches.endless()
        for step in state.steps(steps):
            samples, labels = step.inputs(next(stream))
            optimizer.zero_grad()
            noise = time.monotonic() % 1.0 if fault == "changing" else 0.0
            loss = torch.nn.functional.cross_entropy(model(augmented(samples) + noise), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            running["loss"] = 0.9 * running["loss"] + 0.1 * loss.item()
            time.sleep(step_s)
            with step.update():
                optimizer.step()
                if fault == "drifting" and step.index:
                    next(module.parameters()).data.add_(1e-6 * rank)

    loop()
    end = {
        "parameters": digest(dict(module.named_parameters())),
        "buffers": digest(dict(module.named_buffers())),
        "optimizer": digest(optimizer_tensors(optimizer)),
        "random numbers": digest({"torch": torch.get_rng_state()}),
        "data": batches.state_dict(),
        "running": running["loss"].hex(),
        "pid": os.getpid(),
    }
    (records / f"end.{rank}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), "".join(sys.argv[4:]))
