"""The training of `training.py`, whose values are held against rules: batches at some positions are no good.

Runs under `midstep run`: `ruled.py RECORDS STEPS STEP_S BAD`, where BAD is JSON: `rank` meets its `batches`, which are
counted over all epochs, and reports a loss that is no number, `times` times. `leave_out`: nobody meets these batches
at all, as in a run whose data never had them. `fails`: what the rank does instead: it raises (`oom`), prints a line
(`prints`), prints one and exits (`exits`), or takes longer (`dawdles`).

Each rank writes down the batches of the steps that were committed (`drawn.RANK`).
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from training import Trained, augmented, wait_at_gate  # type: ignore[import-not-found]

import midstep

DAWDLES_S = 0.5


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
    trained = Trained()
    batches, bad = trained.batches, Bad(given, records, trained.rank)

    def drawn(stream: Any) -> tuple[int, Any]:
        while True:
            batch = batches.epoch * len(batches) + batches.batch
            found = next(stream)
            if batch not in bad.leave_out:
                return batch, found

    @midstep.resilient(trained.state)
    def loop() -> None:
        stream = batches.endless()
        for step in trained.state.steps(steps):
            wait_at_gate(records, step.index)
            began_s = time.monotonic()
            batch, (samples, labels) = drawn(stream)
            loss = trained.forward(augmented(samples), labels)
            if given.get("fails") == "oom" and bad.meets(batch):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 TiB")
            if given.get("fails") in {"prints", "exits"} and bad.meets(batch):
                print(f"link 3 of rank {os.environ['RANK']} is down", flush=True)
                if given["fails"] == "exits":
                    os._exit(3)
            if given.get("fails") == "dawdles" and bad.meets(batch):
                time.sleep(DAWDLES_S)
            trained.backward(loss)
            time.sleep(max(0.0, step_s - (time.monotonic() - began_s)))
            step.report(
                loss=loss * float("nan") if "fails" not in given and bad.meets(batch) else loss, samples=len(labels)
            )
            with step.update():
                trained.update()
            trained.record(records, step.index, loss)
            with (records / f"drawn.{trained.rank}").open("a") as record:
                record.write(f"{step.index} {batch}\n")

    loop()
    trained.end(records)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]))
