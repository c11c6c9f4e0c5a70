"""Resilient training on megatron-core that writes down what it did: every loss as exact bits, and digests at the end.

`make demo DEMO=--megatron` runs it twice, undisturbed and with two kills, and compares what was written.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from midstep.adapters.megatron import FromSample, resilient
from midstep.examples.megatron import gpt
from midstep.examples.train_and_record import digest

TENSOR = 2


@resilient
def train(job: gpt.Training, data_iterator: Any, directory: Path, steps: int, iteration: int = 0) -> None:
    """Train until `steps`, and write each loss down."""
    while iteration < steps:
        loss = gpt.train_step(job, data_iterator)
        with (directory / f"loss.{dist.get_rank()}").open("a") as record:
            record.write(f"{iteration} {loss.hex()}\n")
        iteration += 1


def main(directory: Path, steps: int) -> None:
    """Train and write the record of this rank into `directory`."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    gpt.start(tensor=TENSOR)
    job = gpt.build(tensor=TENSOR, distributed=True)
    train(job, FromSample(gpt.batches), directory, steps)
    states = {
        f"{index}.{position}.{name}": value
        for index, leaf in enumerate(job.optimizer.chained_optimizers)
        for position, entries in enumerate(leaf.optimizer.state.values())
        for name, value in entries.items()
    }
    result = {
        "parameters": digest(dict(job.model.named_parameters())),
        "optimizer": digest(states),
        "random numbers": digest({"torch": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}),
    }
    (directory / f"digest.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
