"""A training in which a rank hangs in a step, in one of several ways, before it has entered a collective.

Runs under `midstep run`: `resting.py RECORDS STEPS STEP_S HOW`. All ranks compute for STEP_S in each step; rank 1 hangs
once.
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import midstep

HANGS_AT = 15


def sleep() -> None:
    """Sleep over and over."""
    while True:
        time.sleep(0.1)


def deadlock() -> None:
    """Wait for a lock that this thread holds."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def receive() -> None:
    """Wait for a peer that does not answer."""
    ours, theirs = socket.socketpair()
    ours.recv(1)
    theirs.close()


def write() -> None:
    """Save to where it is not taken."""
    _, writes = os.pipe()
    os.write(writes, bytes(1 << 20))


def wait_for_helper() -> None:
    """Wait for a thread that waits for a peer."""
    helper = threading.Thread(target=receive, daemon=True)
    helper.start()
    helper.join()


HANGS = {each.__name__: each for each in (sleep, deadlock, receive, write, wait_for_helper)}


def train(records: Path, steps: int, step_s: float, how: str) -> None:
    """Train, and hang."""
    midstep.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = midstep.TrainState(model=model, optimizer=optimizer)
    marker = records / "hung"

    @midstep.resilient(state)
    def loop() -> None:
        for step in state.steps(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            if (rank, step.index) == (1, HANGS_AT) and not marker.exists():
                marker.touch()
                HANGS[how]()
            until_s = time.thread_time() + step_s
            while time.thread_time() < until_s:
                pass
            loss.backward()
            with step.update():
                optimizer.step()

    loop()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
