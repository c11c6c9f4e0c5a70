"""The training that is hurt in these tests: on torch-npu's own device, over its own process groups.

Runs under `midstep run --device npu`: `training.py RECORDS STEPS STEP_S`. It writes what that of tests/chaos does.
"""

# torch.npu is there once torch_npu was imported, which no type checker sees.
# mypy: disable-error-code="attr-defined, import-not-found, unused-ignore"

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

import midstep

WIDTH = 32
BATCH = 4
GATE_S = 0.02


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of all tensors, bit for bit."""
    hashed = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode())
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def train(records: Path, steps: int, step_s: float) -> None:
    """Train for `steps` steps of at least `step_s`, and write this rank's record."""
    midstep.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = (torch.nn.Linear(8, WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 2))
    module = torch.nn.Sequential(*layers).to("npu")
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    data, wanted = torch.randn(steps, BATCH, 8), torch.randn(steps, BATCH, 2)
    state = midstep.TrainState(model=model, optimizer=optimizer)

    @midstep.resilient(state)
    def loop() -> None:
        for step in state.steps(steps):
            while (records / f"gate.{step.index}").exists():
                time.sleep(GATE_S)
            began_s = time.monotonic()
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(data[step.index].to("npu")), wanted[step.index].to("npu"))
            loss.backward()  # type: ignore[no-untyped-call]
            time.sleep(max(0.0, step_s - (time.monotonic() - began_s)))
            with step.update():
                optimizer.step()
            with (records / f"steps.{rank}").open("a") as record:
                record.write(f"{step.index} {float(loss.item()).hex()} {digest(dict(module.named_parameters()))}\n")

    loop()
    slots = {
        f"{index}.{name}": value
        for index, found in optimizer.state_dict()["state"].items()
        for name, value in found.items()
    }
    end = {
        "parameters": digest(dict(module.named_parameters())),
        "optimizer": digest(slots),
        "random numbers": digest({"cpu": torch.get_rng_state(), "npu": torch.npu.get_rng_state()}),
        "pid": os.getpid(),
    }
    (records / f"end.{rank}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
