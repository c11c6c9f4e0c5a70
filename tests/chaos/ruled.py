"""The training of `training.py`, whose values are held against rules: batches at some positions are no good.

Runs under `midstep run`: `ruled.py RECORDS STEPS STEP_S BAD`, where BAD is JSON: `rank` meets its `batches`, which are
counted over all epochs, and reports a loss that is no number, `times` times. `leave_out`: nobody meets these batches
at all, as in a run whose data never had them. `fails`: what the rank raises instead (`oom`).

Each rank writes down the batches of the steps that were committed (`drawn.RANK`).
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from training import (  # type: ignore[import-not-found]
    BATCH,
    SAMPLES,
    augmented,
    build_model,
    build_optimizer,
    build_scheduler,
    digest,
    optimizer_tensors,
)

import midstep
from midstep.processor.data import ResumableBatches


class Bad:
    """The batches that are no good, how often this process has met one, and which nobody is to meet."""

    def __init__(self, given: dict[str, Any], records: Path, rank: int) -> None:
        self.leave_out = set(given.get("leave_out", ()))
        self._batches = set(given.get("batches", ())) if rank == given.get("rank") else set()
        self._times = given.get("times", 1000)
        self._met = records / f"met.{rank}"

    def meets(self, batch: int) -> bool:
        """Say whether this batch is no good now, and write that down."""
        if batch not in self._batches:
            return False
        met = self._met.read_text().split() if self._met.exists() else []
        with self._met.open("a") as written:
            written.write(f"{batch}\n")
        return bool(met.count(str(batch)) < self._times)


def train(records: Path, steps: int, step_s: float, given: dict[str, Any]) -> None:
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
    bad = Bad(given, records, rank)
    state = midstep.TrainState(
        model=model, optimizer=optimizer, scheduler=scheduler, data=batches, values={"running": running}
    )

    def drawn(stream: Any) -> tuple[int, Any]:
        while True:
            batch = batches.epoch * len(batches) + batches.batch
            found = next(stream)
            if batch not in bad.leave_out:
                return batch, found

    @midstep.resilient(state)
    def loop() -> None:
        stream = batches.endless()
        for step in state.steps(steps):
            while (records / f"gate.{step.index}").exists():
                time.sleep(0.02)
            began_s = time.monotonic()
            batch, (samples, labels) = drawn(stream)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(augmented(samples)), labels)
            if given.get("fails") == "oom" and bad.meets(batch):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 TiB")
            loss.backward()  # type: ignore[no-untyped-call]
            running["loss"] = 0.9 * running["loss"] + 0.1 * loss.item()
            time.sleep(max(0.0, step_s - (time.monotonic() - began_s)))
            step.report(
                loss=loss * float("nan") if "fails" not in given and bad.meets(batch) else loss, samples=len(labels)
            )
            with step.update():
                optimizer.step()
                scheduler.step()
            with (records / f"steps.{rank}").open("a") as record:
                record.write(f"{step.index} {float(loss.item()).hex()} {digest(dict(module.named_parameters()))}\n")
            with (records / f"drawn.{rank}").open("a") as record:
                record.write(f"{step.index} {batch}\n")

    loop()
    end = {
        "parameters": digest(dict(module.named_parameters())),
        "buffers": digest(dict(module.named_buffers())),
        "optimizer": digest(optimizer_tensors(optimizer)),
        "scheduler": [scheduler.last_epoch, *(float(rate).hex() for rate in scheduler.get_last_lr())],
        "random numbers": digest({"torch": torch.get_rng_state()}),
        "data": batches.state_dict(),
        "running": running["loss"].hex(),
    }
    (records / f"end.{rank}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]))
