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


def in_buckets(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with its gradients reduced over all ranks."""
    return DistributedDataParallel(model, bucket_cap_mb=0.005)


def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the model."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def build_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the scheduler of the optimizer."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)


def digest(tensors: Tensors) -> str:
    """Return a hash of all tensors, bit for bit; of sharded ones of this rank's pieces."""
    hashed = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode())
        piece = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # DTensor takes long to import
        hashed.update(piece.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
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


class Trained:
    """A model with all that changes in a step of its training, and data of each rank's own."""

    def __init__(
        self,
        build: Callable[[], torch.nn.Module] = build_model,
        distribute: Callable[[torch.nn.Module], torch.nn.Module] = in_buckets,
    ) -> None:
        """Build everything, on this rank of a job. `build`: makes the model, the same everywhere."""
        midstep.init_process_group()
        self.rank = dist.get_rank()
        self.module = build()
        self._model = distribute(self.module)
        self._optimizer = build_optimizer(self.module)
        self._scheduler = build_scheduler(self._optimizer)
        torch.manual_seed(100 + self.rank)
        random.seed(200 + self.rank)
        np.random.seed(300 + self.rank)
        data = TensorDataset(torch.randn(SAMPLES, 16), torch.randint(0, 4, (SAMPLES,)))
        self.batches = ResumableBatches(DataLoader(data, batch_size=BATCH, shuffle=True), seed=self.rank)
        self._running = {"loss": 0.0}
        self.state = midstep.TrainState(
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            data=self.batches,
            values={"running": self._running},
        )

    def forward(self, samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Begin a step, and return its loss."""
        self._optimizer.zero_grad()
        return torch.nn.functional.cross_entropy(self._model(samples), labels)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._running["loss"] = 0.9 * self._running["loss"] + 0.1 * loss.item()

    def update(self) -> None:
        """Apply them."""
        self._optimizer.step()
        self._scheduler.step()

    def record(self, records: Path, step: int, loss: torch.Tensor) -> None:
        """Write down what a step has given, bit for bit."""
        with (records / f"steps.{self.rank}").open("a") as record:
            record.write(f"{step} {float(loss.item()).hex()} {digest(dict(self.module.named_parameters()))}\n")

    def end(self, records: Path) -> None:
        """Write down how this rank has ended, and leave the job."""
        random_numbers = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(random.getstate()[1]),
            "numpy": torch.from_numpy(np.random.get_state(legacy=False)["state"]["key"].astype(np.int64)),
        }
        end = {
            "parameters": digest(dict(self.module.named_parameters())),
            "buffers": digest(dict(self.module.named_buffers())),
            "optimizer": digest(optimizer_tensors(self._optimizer)),
            "scheduler": [self._scheduler.last_epoch, *(float(rate).hex() for rate in self._scheduler.get_last_lr())],
            "random numbers": digest(random_numbers),
            "data": self.batches.state_dict(),
            "running": self._running["loss"].hex(),
            "pid": os.getpid(),
        }
        (records / f"end.{self.rank}.json").write_text(json.dumps(end))
        dist.destroy_process_group()


def wait_at_gate(records: Path, step: int) -> None:
    """Wait in front of a step for as long as its gate is there."""
    while (records / f"gate.{step}").exists():
        time.sleep(0.02)


def train(
    records: Path,
    steps: int,
    step_s: float,
    *,
    lifecycle: midstep.Lifecycle | None = None,
    augment: Callable[[torch.Tensor], torch.Tensor] = augmented,
) -> None:
    """Train for `steps` steps of at least `step_s` and write this rank's record."""
    trained = Trained()

    @midstep.resilient(trained.state, lifecycle=lifecycle)
    def loop() -> None:
        stream = trained.batches.endless()
        for step in trained.state.steps(steps):
            wait_at_gate(records, step.index)
            began_s = time.monotonic()
            samples, labels = next(stream)
            loss = trained.forward(augment(samples), labels)
            trained.backward(loss)
            time.sleep(max(0.0, step_s - (time.monotonic() - began_s)))
            step.report(loss=loss)
            with step.update():
                trained.update()
            trained.record(records, step.index, loss)

    loop()
    trained.end(records)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        limit_bytes = int(sys.argv[4])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
