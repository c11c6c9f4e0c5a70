"""Trains a GPT on megatron-core, tensor parallel 2. Start it with torchrun; any process that is lost ends the job."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from midstep.examples.megatron import gpt

STEPS, TENSOR = 60, 2


def train(job: gpt.Training, data_iterator: Iterator[Any], iteration: int = 0) -> None:
    """Train until STEPS."""
    while iteration < STEPS:
        loss = gpt.train_step(job, data_iterator)
        if dist.get_rank() == 0:
            print(f"iteration {iteration} loss {loss:.4f}", flush=True)
        iteration += 1


if __name__ == "__main__":
    gpt.start(tensor=TENSOR)
    train(gpt.build(tensor=TENSOR), gpt.batches(0))
    dist.destroy_process_group()
