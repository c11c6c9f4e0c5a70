"""The training of `training.py`, whose values are held against rules: batches at some positions are no good.

Runs under `midstep run`: `ruled.py RECORDS STEPS STEP_S BAD`, where BAD is JSON: `rank` meets its `batches`, which are
counted over all epochs, and reports a loss that is no number, `times` times. `leave_out`: nobody meets these batches
at all, as in a run whose data never had them. `fails`: what the rank does instead: it raises in the middle of its
forward pass (`oom`), prints a line (`prints`), prints one and exits (`exits`), takes longer (`dawdles`), or its loss
itself is no number (`diverges`); those of its batches that `jumps` has as well give a loss that is far too large.
`late`: another rank that does the same with these batches; it raises a while later.

With `mesh` (rows that replicate, and columns) the model is sharded by `fully_shard`, and not wrapped by DDP.

Each rank writes down the batches of the steps that were committed (`drawn.RANK`).
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from training import Trained, augmented, build_model, in_buckets, wait_at_gate  # type: ignore[import-not-found]

import midstep

DAWDLES_S = 0.5
LATE_S = 0.3  # by then a rank has heard that all are to stop
FAR_TOO_LARGE = 50.0  # times the loss


class Bad:
    """The batches that are no good, how often this process has met one, and which nobody is to meet."""

    def __init__(self, given: dict[str, Any], records: Path, rank: int) -> None:
        self.leave_out = set(given.get("leave_out", ()))
        self.fails: str | None = given.get("fails")
        self._jumps = set(given.get("jumps", ()))
        self.is_late = rank == given.get("late")
        self._batches = set(given.get("batches", ())) if rank == given.get("rank") or self.is_late else set()
        self._times = given.get("times", 1000)
        self._met = records / f"met.{rank}"

    def meets(self, batch: int, fails: str | None) -> bool:
        """Say whether this batch is no good now, in this way, and write that down."""
        if batch not in self._batches or fails != self.fails:
            return False
        met = self._met.read_text().split() if self._met.exists() else []
        with self._met.open("a") as written:
            written.write(f"{batch}\n")
        return bool(met.count(str(batch)) < self._times)

    def diverged(self, batch: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss that this batch gives."""
        if not self.meets(batch, "diverges"):
            return loss
        return loss * (FAR_TOO_LARGE if batch in self._jumps else float("nan"))


@contextmanager
def lack_of_memory(model: torch.nn.Module, *, lacks: bool, late: bool) -> Iterator[None]:
    """Have the last layer of a model raise: the layers before it have done their part."""

    def raises(*_: Any) -> None:
        time.sleep(LATE_S if late else 0.0)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 TiB")

    hook = list(model.children())[-1].register_forward_pre_hook(raises) if lacks else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def sharding(mesh: list[int]) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return what shards each layer with parameters, and the rest of the model, on a mesh of rows and columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def shard(model: torch.nn.Module) -> torch.nn.Module:
        whole = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("replicate", "shard"))
        for layer in model.children():
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=whole)
        return fully_shard(model, mesh=whole)  # type: ignore[no-any-return]

    return shard


def train(records: Path, steps: int, step_s: float, given: dict[str, Any]) -> None:
    """Train for `steps` steps of at least `step_s` and write this rank's record."""
    trained = Trained(build_model, sharding(given["mesh"]) if "mesh" in given else in_buckets)
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
            with lack_of_memory(trained.module, lacks=bad.meets(batch, "oom"), late=bad.is_late):
                loss = bad.diverged(batch, trained.forward(augmented(samples), labels))
            if bad.meets(batch, "prints") or bad.meets(batch, "exits"):
                print(f"link 3 of rank {os.environ['RANK']} is down", flush=True)
                if bad.fails == "exits":
                    os._exit(3)
            if bad.meets(batch, "dawdles"):
                time.sleep(DAWDLES_S)
            trained.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(trained.module.parameters(), 1.0)
            time.sleep(max(0.0, step_s - (time.monotonic() - began_s)))
            told = loss * float("nan") if bad.meets(batch, None) else loss
            step.report(loss=told, grad_norm=norm, samples=len(labels))
            with step.update():
                trained.update()
            trained.record(records, step.index, loss)
            with (records / f"drawn.{trained.rank}").open("a") as record:
                record.write(f"{step.index} {batch}\n")

    loop()
    trained.end(records)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]))
