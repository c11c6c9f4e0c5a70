"""Worlds that write a checkpoint of torch.distributed.checkpoint, by midstep or plain torch, and others that read it.

Runs as a program, `dcp_world.py DIRECTORY WRITERS READERS`, of which the last two are meshes like `4,2x2,ddp`. A world
of plain gloo is enough for files. Each is forked, trains three steps or reads, and whole parameters, moments and rates
are compared bit for bit.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.processor.checkpoints import archive
from midstep.processor.checkpoints.dcp import file_name

STEP = 3
Mesh = tuple[int, ...]  # without dimensions: DDP


class Setup:
    """A model with odd sizes and buffers, its optimizer, its scheduler and its state, on a mesh."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
        if mesh:
            names = ("replicate", "shard")[-len(mesh) :]
            devices = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            for layer in self.model:
                fully_shard(layer, mesh=devices)
            fully_shard(self.model, mesh=devices)
        self.wrapped = self.model if mesh else DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = midstep.TrainState(self.wrapped, self.optimizer, self.scheduler)

    def train(self) -> None:
        """Train some steps."""
        for _ in range(STEP):
            self.optimizer.zero_grad()
            self.wrapped(torch.randn(4, 3)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def whole(self) -> dict[str, Any]:
        """Return everything that is the same in a world of any size, put together again."""
        found = {name: full(each) for name, each in self.model.state_dict().items() if "running" not in name}
        for index, parameter in enumerate(self.model.parameters()):
            for key, each in self.optimizer.state[parameter].items():
                found[f"{index}.{key}"] = full(each)
        return {**found, "lr": self.optimizer.param_groups[0]["lr"], "scheduler": self.scheduler.state_dict()}

    def for_torch(self) -> dict[str, Any]:
        """Return the state as a script of plain torch has it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}


def full(tensor: Any) -> Any:
    """Return a whole tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def write(mesh: Mesh, directory: Path, by_torch: bool) -> dict[str, Any]:
    """Train and write."""
    setup = Setup(mesh, 1)
    setup.train()
    rank = dist.get_rank()
    if by_torch:
        save(setup.for_torch(), checkpoint_id=str(directory / f"step-{STEP:08d}"))
        return setup.whole()
    for number, shard_id in enumerate(setup.state.writes()):
        archive.save_portable(directory, STEP, file_name(rank, number), shard_id, setup.state)
    archive.save_local(directory, STEP, rank, setup.state.capture_local())
    dist.barrier()
    if rank == 0:
        archive.publish(directory, STEP, world_size=dist.get_world_size())
    return setup.whole()


def read(mesh: Mesh, directory: Path, by_torch: bool) -> dict[str, Any]:
    """Read into a model that has other parameters."""
    setup = Setup(mesh, 2)
    if by_torch:
        state = setup.for_torch()  # torch makes an optimizer step of zero gradients for it
        load(state, checkpoint_id=str(directory / f"step-{STEP:08d}"))
        set_state_dict(
            setup.model, setup.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        setup.scheduler.load_state_dict(state["scheduler"])
        return setup.whole()
    for hold in setup.state.shards():
        archive.load_shard(directory, STEP, hold.shard_id, setup.state)
    saved = archive.world_size_of(directory, STEP)
    if saved is not None:
        rank = dist.get_rank()
        setup.state.adopt_local(archive.load_local(directory, STEP, rank % saved), random_numbers=rank < saved)
    return setup.whole()


class Order(NamedTuple):
    """One world, and what its ranks do: train and write, or read; by midstep or by torch."""

    job: Callable[[Mesh, Path, bool], dict[str, Any]]
    mesh: Mesh
    directory: Path
    by_torch: bool

    @property
    def world(self) -> int:
        """How many ranks it has."""
        return torch.Size(self.mesh).numel() if self.mesh else 2


def run(*order: Any) -> Any:
    """Fork a world and return what its first rank returns."""
    given = Order(*order)
    (given.directory / "store").unlink(missing_ok=True)
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.start_processes(_rank, (given,), given.world, start_method="fork")
    return torch.load(given.directory / "result", weights_only=False)


def _rank(rank: int, order: Order) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(order.directory / "store"), order.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order.world, timeout=timedelta(seconds=60))
    found = order.job(order.mesh, order.directory, order.by_torch)
    if rank == 0:
        torch.save(found, order.directory / "result")
    dist.destroy_process_group()


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two states are equal bit for bit."""
    alike = {name: torch.equal(each, theirs[name]) if hasattr(each, "shape") else each == theirs[name]
             for name, each in ours.items()}  # fmt: skip
    print(*(name for name, equal in alike.items() if not equal), flush=True)
    return ours.keys() == theirs.keys() and all(alike.values())


def main() -> None:
    """Write and read all pairs; exits with the number of those that differ."""
    differing = 0
    os.environ["OMP_NUM_THREADS"] = "1"
    writers, readers = (
        [() if each == "ddp" else tuple(map(int, each.split("x"))) for each in argument.split(",")]
        for argument in sys.argv[2:]
    )
    for mesh in writers:
        for written_by_torch in (False, True):
            directory = Path(sys.argv[1]) / f"{'x'.join(map(str, mesh)) or 'ddp'}-{written_by_torch}"
            directory.mkdir()
            wrote = run(write, mesh, directory, written_by_torch)
            for into in readers:
                for read_by_torch in (False, True):
                    equal = same(wrote, run(read, into, directory, read_by_torch))
                    differing += not equal
                    print(f"{mesh} by torch: {written_by_torch}; {into} by torch: {read_by_torch}: {equal}", flush=True)
    sys.exit(differing)


if __name__ == "__main__":
    main()
