"""A script with Hugging Face Accelerate, which is hurt in these tests: as its users write one, and docs/accelerate.md.

Runs under `midstep run`: `training.py RECORDS STEPS PRECISION`. Each step has two micro-batches. A file `gate.<step>`
among the records holds all ranks in front of that step for as long as it is there.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import midstep
from midstep.examples.gpt import GPT, VOCABULARY, Shape
from midstep.examples.train_and_record import digest, optimizer_tensors
from midstep.processor.data import ResumableBatches

PARTS = 2
SAMPLES = 512


def main(records: Path, steps: int, precision: str) -> None:
    """Train, and write down what each step has given."""
    midstep.init_process_group()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=PARTS)
    torch.manual_seed(1)
    shape = Shape(dropout=0.1)
    network = GPT(shape)
    data = TensorDataset(torch.randint(VOCABULARY, (SAMPLES, shape.context + 1)))
    adam = torch.optim.AdamW(network.parameters(), lr=1e-3)
    decay = torch.optim.lr_scheduler.LinearLR(adam, total_iters=10 * steps)
    model, optimizer, scheduler = accelerator.prepare(network, adam, decay)
    batches = ResumableBatches(DataLoader(data, batch_size=4, sampler=DistributedSampler(data)), seed=1)
    rank = accelerator.process_index
    torch.manual_seed(100 + rank)
    state = midstep.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=batches)

    def record(step: int, losses: list[float]) -> None:
        with (records / f"steps.{rank}").open("a") as file:
            file.write(f"{step} {math.fsum(losses).hex()} {digest(dict(network.named_parameters()))}\n")

    @midstep.resilient(state)
    def train() -> None:
        stream = batches.endless()
        for step in state.steps(steps):
            while (records / f"gate.{step.index}").exists():
                time.sleep(0.02)
            accelerator.step = 0  # its count of micro-batches: an interrupted step may have left it odd
            losses = []
            for _ in range(PARTS):
                (tokens,) = next(stream)
                with accelerator.accumulate(model):
                    loss = model(tokens[:, :-1], tokens[:, 1:])
                    accelerator.backward(loss)
                losses.append(loss.item())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            with step.update():
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record(step.index, losses)

    train()
    end = {
        "parameters": digest(dict(network.named_parameters())),
        "optimizer": digest(optimizer_tensors(adam)),
        "rate": [float(each).hex() for each in decay.get_last_lr()],
        "random numbers": digest({"torch": torch.get_rng_state()}),
        "data": batches.state_dict(),
        "pid": os.getpid(),
    }
    (records / f"end.{rank}.json").write_text(json.dumps(end))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
