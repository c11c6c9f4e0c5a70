"""torchtitan's own program and its debug model on the CPU, which writes down each loss as exact bits, and digests.

`midstep demo --titan` runs it twice, undisturbed and under faults, and compares what was written:
`train_and_record.py RECORDS STEPS ASSETS`. Nothing of torchtitan's is changed; its trainer is watched.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from midstep.examples.torchtitan.on_cpu import prepare
from midstep.examples.train_and_record import Tensors, digest, optimizer_tensors

ARGUMENTS = (
    *("--module", "llama3", "--config", "llama3_debugmodel", "--debug.seed", "1"),
    *("--training.local_batch_size", "1", "--training.seq_len", "32", "--training.disable_cuda_graphs"),
    *("--training.mixed_precision_param", "float32", "--optimizer.implementation", "for-loop"),
    *("--parallelism.spmd_backend", "partial_dtensor"),  # torch 2.13 lacks what the default takes
    *("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "2"),
    *("--metrics.log_freq", "10", "--metrics.disable_color_printing"),
)


def pieces(tensors: dict[str, Any]) -> Tensors:
    """Return this rank's pieces of tensors, of which some are sharded."""
    return {name: each.to_local() if hasattr(each, "to_local") else each for name, each in tensors.items()}


def held(trainer: Any) -> dict[str, Any]:
    """Return digests of what this rank holds."""
    parameters: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    for index, part in enumerate(trainer.model_parts):
        parameters |= {f"{index}.{name}": each for name, each in part.named_parameters()}
    for index, optimizer in enumerate(trainer.optimizers.optimizers):
        moments |= {f"{index}.{name}": each for name, each in optimizer_tensors(optimizer).items()}
    return {
        "parameters": digest(pieces(parameters)),
        "optimizer": digest(pieces(moments)),
        "random numbers": digest({"torch": torch.get_rng_state()}),
        "tokens seen": trainer.ntokens_seen,
    }


def watch(records: Path) -> None:
    """Have torchtitan's trainers write records: each loss before its update, and digests at the end."""
    from torchtitan.trainer import Trainer

    compute: Callable[..., Any] = Trainer.forward_backward_step
    close: Callable[..., Any] = Trainer.close

    def forward_backward_step(trainer: Any, **batch: Any) -> Any:
        loss = compute(trainer, **batch)
        mean = float(loss.detach()) * dist.get_world_size()  # torchtitan divides each rank's sum by the tokens of all
        # Before the update: a process that is lost after its commit does not come back to write this.
        with (records / f"loss.{dist.get_rank()}").open("a") as record:
            record.write(f"{trainer.step - 1} {mean.hex()}\n")
        return loss

    def end(trainer: Any) -> None:
        if sys.exc_info()[0] is None:
            (records / f"digest.{dist.get_rank()}.json").write_text(json.dumps(held(trainer)))
        close(trainer)

    Trainer.forward_backward_step, Trainer.close = forward_backward_step, end


def main(records: Path, steps: int, assets: Path) -> None:
    """Run torchtitan's program for `steps` steps and write the record of this rank into `records`."""
    torch.set_num_threads(1)
    os.chdir(assets)
    sys.argv[1:] = [*ARGUMENTS, "--training.steps", str(steps), "--dump_folder", str(records / "dump")]
    prepare()
    watch(records)
    from midstep.adapters.torchtitan.__main__ import main as train

    train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
