"""Real gloo ranks that train with DDP, are interrupted, and go on. Run as a script by test_ddp_recovery.py.

Each scenario trains once with plain DDP and once with a TrainState, interruptions and a rank rebuilt from nothing, and
writes the digests of both.
"""

import hashlib
import itertools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from midstep.adapters.ddp.buckets import Layout
from midstep.adapters.ddp.state import TrainState
from midstep.processor.transfer import run_transfers
from midstep.protocol.types import LocalStateTransfer, RepairPart, RestoreSource, ShardTransfer

WORLD = 3
STEPS = 10


class Net(nn.Module):
    """Layers used in another order than they are defined, with dropout, batch norm, a codebook and a shared weight."""

    mean: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(48, 12)
        self.first = nn.Linear(20, 64)
        self.norm = nn.BatchNorm1d(64)
        self.middle = nn.Linear(64, 48)
        self.wide = nn.Linear(48, 48).double()
        self.tied = nn.Linear(48, 12, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("mean", torch.zeros(48))
        self.register_buffer("mask", torch.randn(48).ge(-2).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)
        x = self.middle(x).tanh() * self.mask
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # an unregistered habit: writes through .data
        x = x + self.wide(x.double()).float() - self.mean
        out: torch.Tensor = self.last(x) + self.tied(x)
        return out


class Script:
    """What a user's script builds and does in a step."""

    def __init__(self, options: dict[str, Any], seed: int, group: Any = None) -> None:
        torch.manual_seed(seed)
        self.options = options
        self.model = DistributedDataParallel(
            Net(),
            process_group=group,
            bucket_cap_mb=0.008,
            find_unused_parameters=options.get("unused", False),
            static_graph=options.get("static", False),
            gradient_as_bucket_view=options.get("views", False),
        )
        if options.get("hook"):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            self.model.register_comm_hook(None, fp16_compress_hook)
        parameters = self.model.parameters()
        if options.get("sgd"):
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=STEPS + 5)
        self.losses: list[float] = []
        self.state = TrainState(self.model, self.optimizer, self.scheduler, values={"losses": self.losses})

    def gradients(self, step: int, interrupt: bool = False) -> None:
        rank = dist.get_rank()
        self.optimizer.zero_grad()
        micro = self.options.get("accumulate", 1)
        for index in range(micro):
            data = torch.Generator().manual_seed(step * 1000 + rank * 10 + index)
            x = torch.randn(16, 20, generator=data)
            handle = None
            if interrupt and index == micro - 1:
                handle = self.model.module.middle.weight.register_hook(_fail)
            try:
                if index < micro - 1:
                    with self.model.no_sync():
                        self.model(x).pow(2).mean().backward()
                else:
                    loss = self.model(x).pow(2).mean()
                    loss.backward()
                    self.losses.append(loss.item())
            finally:
                if handle is not None:
                    handle.remove()

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, tensor in sorted(self.model.module.state_dict().items()):
            found.update(name.encode() + tensor.detach().numpy().tobytes())
        for index, entries in self.optimizer.state_dict()["state"].items():
            for key, value in sorted(entries.items()):
                found.update(f"{index}.{key}".encode() + torch.as_tensor(value).numpy().tobytes())
        found.update(repr((self.losses, self.scheduler.get_last_lr(), torch.rand(3).tolist())).encode())
        return found.hexdigest()


class GlooLinks:
    def isend(self, tensor: torch.Tensor, rank: int) -> Any:
        return dist.isend(tensor, rank)

    def irecv(self, tensor: torch.Tensor, rank: int) -> Any:
        return dist.irecv(tensor, rank)


class Interrupted(Exception):
    pass


def _fail(_gradient: torch.Tensor) -> None:
    raise Interrupted


def undisturbed(options: dict[str, Any]) -> str:
    script = Script(options, seed=7)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(STEPS):
        script.gradients(step)
        script.update()
    return script.digest()


def disturbed(options: dict[str, Any], alone: Any) -> str:
    """Train; at each step of options["at"] interrupt all ranks in backward, and build the victim again from nothing."""
    rank = dist.get_rank()
    script = Script(options, seed=7)
    torch.manual_seed(100 + rank)
    copies = {0: script.state.capture_local()}
    at = list(options["at"])
    step = 0
    while step < STEPS:
        try:
            script.gradients(step, interrupt=step in at)
            copies[step + 1] = script.state.capture_local()
            if step in at:
                raise Interrupted  # the hook did not fire: in the barrier then
        except Interrupted:
            at.remove(step)
            script = _recover(script, step, options, copies, alone)
            continue
        script.update()
        step += 1
    return script.digest()


def _recover(script: Script, step: int, options: dict[str, Any], copies: dict[int, bytes], alone: Any) -> Script:
    rank, victim = dist.get_rank(), options.get("victim", 1)
    dist.barrier()
    if rank == victim:
        script = Script(options, seed=999, group=alone)
        world = dist.distributed_c10d._get_default_group()
        script.model.process_group = world
        script.model.reducer._update_process_group(world)
        torch.manual_seed(4711)
    else:
        script.state.clean()
    size = torch.tensor([script.state.shards()[0].size_bytes])
    sizes = [torch.zeros_like(size) for _ in range(WORLD)]
    dist.all_gather(sizes, size)
    total = max(int(item) for item in sizes)
    sources = [r for r in range(WORLD) if r != victim]
    half = total // 2 + 3
    transfers = [ShardTransfer("replicated", 0, half, sources[0], victim)]
    transfers.append(ShardTransfer("replicated", half, total - half, sources[1], victim))
    part = RepairPart(
        target_step=step,
        restore=RestoreSource.REPLICA,
        transfers=tuple(t for t in transfers if rank in (t.source, t.destination)),
        local_states=(LocalStateTransfer(rank, rank),),
        restore_local=True,
    )
    done = run_transfers(
        part, rank=rank, framework=script.state, links=GlooLinks(), read_local_state=lambda _rank, at: copies[at]
    )
    script.state.rebuilt()
    assert done.local_state is not None
    script.state.restore_local(done.local_state)
    if options.get("forget_layout"):
        for layout in script.state._layouts.values():
            layout._set(Layout())
    script.state.rolled_back(step)
    return script


SCENARIOS: dict[str, dict[str, Any]] = {
    **{
        f"k{k}-{kind}": {"at": [k], "sgd": kind == "sgd"}
        for k, kind in itertools.product((0, 1, 2, 7), ("adamw", "sgd"))
    },
    "every-step": {"at": list(range(STEPS)), "victim": 0},
    "rank-0": {"at": [1, 5], "victim": 0},
    "accumulate": {"at": [0, 1, 4], "accumulate": 3, "victim": 2},
    "views": {"at": [0, 1, 4], "views": True, "accumulate": 2},
    "unused": {"at": [0, 1, 4], "unused": True},
    "static": {"at": [0, 1, 2, 5], "static": True},
    "hook": {"at": [0, 1, 4], "hook": True},
    "layout-forgotten": {"at": [4], "forget_layout": True},
}


def run_rank(rank: int, store: str, results: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    found = {}
    for name in names:
        options = SCENARIOS[name]
        found[name] = {"plain": undisturbed(options), "midstep": disturbed(options, alone)}
    (results / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(results: Path, names: list[str]) -> int:
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(rank, str(results / "store"), results, names or list(SCENARIOS))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
