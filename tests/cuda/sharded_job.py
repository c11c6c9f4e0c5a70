"""The job of `sharded` and `copies`: a small GPT under `fully_shard`, recorded as the demo records.

MIDSTEP_CUDA_ROWS says in how many rows of replicas: 2 of two ranks by default.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import midstep
from midstep.examples.gpt import GPT, Shape, random_batch, standard_library_text
from midstep.examples.train_and_record import digest, optimizer_tensors, random_numbers

ROWS = int(os.environ.get("MIDSTEP_CUDA_ROWS", "2"))


def local(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return this rank's pieces."""
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in tensors.items()}


def main(directory: Path, steps: int) -> None:
    """Train for `steps` steps in two micro-batches each, and write the record of this rank into `directory`."""
    midstep.init_process_group()
    device, shape = midstep.device(), Shape()
    torch.use_deterministic_algorithms(device.type != "cpu")
    rank, text = dist.get_rank(), standard_library_text()
    mesh = init_device_mesh(device.type, (ROWS, dist.get_world_size() // ROWS), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(1)
    with midstep.building():
        model: Any = GPT(shape).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    hosts = dist.new_group(backend="gloo")
    torch.manual_seed(100 + rank)
    state = midstep.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(steps):
            optimizer.zero_grad()
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                inputs, targets = random_batch(text, shape, 4)
                loss = model(inputs.to(device), targets.to(device)) / 2
                loss.backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            value = loss.item() + float(norm.full_tensor())
            dist.barrier(hosts)  # what an aborted collective has left is no result; here all have theirs
            with (directory / f"loss.{rank}").open("a") as record:
                record.write(f"{step.index} {value.hex()}\n")
            with step.update():
                optimizer.step()
                scheduler.step()

    train()
    result = {
        "parameters": digest(local(dict(model.named_parameters()))),
        "optimizer": digest(local(optimizer_tensors(optimizer))),
        "random numbers": digest(random_numbers(device)),
    }
    (directory / f"digest.{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
