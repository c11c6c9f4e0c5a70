"""The sharded training that is hurt in these tests: a small GPT with `fully_shard`, clipping and a scheduler.

Each rank writes down its losses and gradient norms as exact bits with a digest of its pieces of the parameters, and at
the end a digest of everything that it holds.

Runs under `midstep run`: `training.py RECORDS SHAPE`. A file `gate.<step>` among the records holds all ranks in front
of that step for as long as it is there.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import midstep
from midstep.examples.gpt import GPT, Shape, random_batch, standard_library_text
from midstep.examples.train_and_record import digest, optimizer_tensors
from midstep.protocol import environment as names

BEFORE_FORWARD, AFTER_BACKWARD = "before forward", "after backward"


class Ending(msgspec.Struct, frozen=True):
    """A rank that kills itself at a place of a step that has no injection point, in one of its lives."""

    rank: int
    place: str
    step: int
    life: int = 1


class Setting(msgspec.Struct, frozen=True):
    """How a job shards and what it does in a step. `mesh`: rows that replicate and columns, or columns only.

    `tensor`: ranks among which the feed-forward layers are cut as well, neighbours of each other.
    """

    mesh: tuple[int, ...]
    tensor: int = 1
    steps: int = 12
    micro_batches: int = 1
    bf16: bool = False
    reshard: bool | int | None = None
    recompute: bool = False
    layers: int = 2
    step_s: float = 0.0
    compiled: bool = False  # each block
    endings: tuple[Ending, ...] = ()


def local(tensor: Any) -> Any:
    """Return this rank's piece."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(model: Any, setting: Setting) -> None:
    """Apply fully_shard to each block, and to the model."""
    dimensions = ("replicate", "shard")[-len(setting.mesh) :]
    whole = init_device_mesh("cpu", (*setting.mesh, setting.tensor), mesh_dim_names=(*dimensions, "tensor"))
    options: dict[str, Any] = {"mesh": whole[dimensions]}
    if setting.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        if setting.tensor > 1:
            parallelize_module(block, whole["tensor"], {"feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()})
        if setting.recompute:
            block.forward = _recomputed(block.forward)
        if setting.compiled:
            block.compile()
        fully_shard(block, **options, reshard_after_forward=setting.reshard)
    fully_shard(model, **options)


def _recomputed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def clip(parameters: list[Any]) -> float:
    """Clip gradients by their norm and return it; over several meshes, which torch's own function does not add up."""
    by_mesh: dict[int, list[Any]] = {}
    for parameter in parameters:
        by_mesh.setdefault(id(parameter.device_mesh), []).append(parameter.grad)
    norms: list[Any] = [torch.nn.utils.get_total_norm(gradients) for gradients in by_mesh.values()]
    norm = torch.stack([each.full_tensor() for each in norms]).norm()
    together = None if len(by_mesh) == 1 else False
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=together)
    return float(norm)


def die(setting: Setting, place: str, step: int) -> None:
    """End this process if that is to happen here."""
    if Ending(dist.get_rank(), place, step, int(os.environ.get(names.INCARNATION, "1"))) in setting.endings:
        os.kill(os.getpid(), signal.SIGKILL)


def train(records: Path, setting: Setting) -> None:
    """Train, and write this rank's record."""
    torch.set_num_threads(1)
    midstep.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(1)
    shape = Shape(layers=setting.layers, heads=2, width=32, context=16, dropout=0.1)
    with midstep.building():
        model: Any = GPT(shape)
    shard(model, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=setting.steps)
    torch.manual_seed(100 + rank // setting.tensor)  # ranks that share a layer see the same batches
    text = standard_library_text(100_000)
    state = midstep.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)

    @midstep.resilient(state)
    def loop() -> None:
        torch.empty((), dtype=torch.int64).random_()  # as `iter` of a DataLoader does, each time that this is called
        for step in state.steps(setting.steps):
            while (records / f"gate.{step.index}").exists():
                time.sleep(0.02)
            began_s = time.monotonic()
            die(setting, BEFORE_FORWARD, step.index)
            optimizer.zero_grad()
            loss: Any = None
            batches = step.inputs([random_batch(text, shape, 4) for _ in range(setting.micro_batches)])
            for micro_batch, batch in enumerate(batches):
                last = micro_batch == setting.micro_batches - 1
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                loss = model(*batch) / setting.micro_batches
                loss.backward()
            die(setting, AFTER_BACKWARD, step.index)
            whole_norm = clip(list(model.parameters()))
            time.sleep(max(0.0, setting.step_s - (time.monotonic() - began_s)))
            with step.update():
                optimizer.step()
                scheduler.step()
            pieces = digest({name: local(each) for name, each in model.named_parameters()})
            with (records / f"steps.{rank}").open("a") as record:
                record.write(f"{step.index} {float(loss.item()).hex()}/{whole_norm.hex()} {pieces}\n")

    loop()
    end = {
        "parameters": digest({name: local(each) for name, each in model.named_parameters()}),
        "optimizer": digest({name: local(each) for name, each in optimizer_tensors(optimizer).items()}),
        "scheduler": [scheduler.last_epoch, *(float(rate).hex() for rate in scheduler.get_last_lr())],
        "rates": [float(group["lr"]).hex() for group in optimizer.param_groups],
        "random numbers": digest({"torch": torch.get_rng_state()}),
        "pid": os.getpid(),
    }
    (records / f"end.{rank}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Setting))
