"""A training with a running mean of the loss behind the optimizer's step, where most scripts have it.

Runs under `midstep run`: `running_mean.py RECORDS STEPS STEP_S [unequal]`. With `unequal` each rank has a model of its
own, which no one synchronises. What each rank has counted, and its mean, is in `end.<rank>.json` afterwards.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import midstep


def train(records: Path, steps: int, step_s: float, *, unequal: bool = False) -> None:
    """Train, and count the steps and the mean of their losses after each update."""
    midstep.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(1 + unequal * rank)
    module = torch.nn.Linear(4, 1)
    model = module if unequal else DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    running = {"steps": 0, "mean": 0.0}
    state = midstep.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, values={"running": running})

    @midstep.resilient(state)
    def loop() -> None:
        for step in state.steps(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            time.sleep(step_s)
            with step.update():
                optimizer.step()
            running["steps"] += 1
            running["mean"] += (loss.item() - running["mean"]) / running["steps"]
            scheduler.step()

    loop()
    audit = [each for each in state.audit() if "update block" in each]
    end = {"steps": running["steps"], "mean": running["mean"].hex(), "audit": audit}
    (records / f"end.{rank}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), unequal="unequal" in sys.argv)
