"""A training whose steps can be repeated by other ranks: it takes its batches by `step.inputs`.

Each rank has data of its own, dropout, batch norm and a running value; otherwise as `training.py`. No layer drops what
comes out of the one in the middle, so that whatever flips there changes the gradients. With `changing` as
the fourth argument something of its forward pass does not repeat itself; with `drifting` the parameters of the ranks
become different in each update; with `saving` a thread of torch's writes a checkpoint beside each step.

`audited.py RECORDS STEPS STEP_S [changing|drifting|saving]`
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from training import WIDTH, Trained, augmented  # type: ignore[import-not-found]

import midstep


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


class Saving:
    """Asynchronous checkpoints of torch's own, whose thread does collectives over a group of its own."""

    def __init__(self, records: Path) -> None:
        self._folder = records
        self._group = dist.new_group(backend="gloo")
        self._saved: Any = None

    def begin(self, module: torch.nn.Module, step: int) -> None:
        """Begin to write the parameters after a step, when those after the step before it are written."""
        self.end()
        place = str(self._folder / f"step-{step}")
        self._saved = async_save(module.state_dict(), checkpoint_id=place, process_group=self._group)

    def end(self) -> None:
        """Wait until all is written that was begun."""
        if self._saved is not None:
            self._saved.result()


def train(records: Path, steps: int, step_s: float, fault: str) -> None:
    """Train, and write down how this rank ended."""
    trained = Trained(build_model)
    saving = Saving(records) if fault == "saving" else None

    @midstep.resilient(trained.state)
    def loop() -> None:
        stream = trained.batches.endless()
        for step in trained.state.steps(steps):
            samples, labels = step.inputs(next(stream))
            noise = time.monotonic() % 1.0 if fault == "changing" else 0.0
            trained.backward(trained.forward(augmented(samples) + noise, labels))
            time.sleep(step_s)
            with step.update():
                trained.update()
                if fault == "drifting" and step.index:
                    next(trained.module.parameters()).data.add_(1e-6 * trained.rank)
            if saving is not None:
                saving.begin(trained.module, step.index)

    loop()
    if saving is not None:
        saving.end()
    trained.end(records)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), "".join(sys.argv[4:]))
