"""The job of `endurance`: rank 1 ends by SIGKILL in every third step, as often as it is told to, and comes back.

Rank 0 survives it all, and notes what it holds after each recovery.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import midstep

EVERY_STEPS = 3
SIZE = 1024


def kill_once(directory: Path, step: int) -> None:
    """End this process in a step of its own, once."""
    mark = directory / f"killed.{step}"
    if not mark.exists():
        mark.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def open_files() -> dict[str, int]:
    """Return how many files of each kind this process has open, and sockets by family and state."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            kinds[os.readlink(f"/proc/self/fd/{name}").partition(":")[0].rstrip("0123456789-")] += 1
    for each in psutil.Process().net_connections(kind="all"):
        address = each.laddr if isinstance(each.laddr, str) else getattr(each.laddr, "ip", "")
        where = address.rstrip("0123456789abcdef") or "unnamed"
        kinds[f"{each.family.name} {each.type.name} {each.status} {where}"] += 1
    return dict(kinds)


def note(directory: Path, step: int) -> None:
    """Write down what this process holds, when the step after a kill is done."""
    mark = directory / f"killed.{step}"
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_reserved()
    with (directory / "survivor.jsonl").open("a") as notes:
        notes.write(
            json.dumps(
                {
                    "pid": os.getpid(),
                    "allocated_bytes": allocated,
                    "outside_bytes": total - free - allocated,
                    "threads": threading.active_count(),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "open": open_files(),
                    "recovered_s": time.monotonic() - float(mark.read_text()) if mark.exists() else 0.0,
                }
            )
            + "\n"
        )


def main() -> None:
    """Take the directory for the notes, and the number of kills."""
    directory, kills = Path(sys.argv[1]), int(sys.argv[2])
    midstep.init_process_group()
    rank, device = dist.get_rank(), midstep.device()
    torch.manual_seed(1)
    layers = [torch.nn.Linear(SIZE, SIZE) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    state = midstep.TrainState(model=model, optimizer=optimizer)

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps((kills + 1) * EVERY_STEPS):
            optimizer.zero_grad()
            loss = model(torch.ones(8, SIZE, device=device)).sum()
            is_due = step.index % EVERY_STEPS == EVERY_STEPS - 1 and step.index // EVERY_STEPS < kills
            if rank == 1 and is_due:
                kill_once(directory, step.index)
            loss.backward()
            with step.update():
                optimizer.step()
            if rank == 0 and is_due:
                note(directory, step.index)

    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
