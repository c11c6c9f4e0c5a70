"""A script that ends in one of several ways, and writes down what it still has at its very end.

Runs under `midstep run`: `parting.py RECORDS WAY`, the way being one of `WAYS`.
"""

import atexit
import json
import os
import sys
import threading
from pathlib import Path

RECORDS, WAY = Path(sys.argv[1]), sys.argv[2]
WAYS = ("return", "raise", "exit")


def note() -> None:
    """Write down the threads of Python, and those that zmq has: it names them."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    found = [thread.name for thread in threading.enumerate()] + [name for name in names if name.startswith("ZMQ")]
    (RECORDS / f"parting.{os.environ['RANK']}.json").write_text(json.dumps(found))


atexit.register(note)  # the first to be registered is the last to be called

import torch  # noqa: E402

import midstep  # noqa: E402

midstep.init_process_group()
if WAY == "exit":
    sys.exit(3)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = midstep.TrainState(model, optimizer)


@midstep.resilient(state)
def train() -> None:
    """Take three steps; in one of the ways rank 0 does not get over the second."""
    for step in state.steps(3):
        model(torch.ones(1, 2)).sum().backward()
        with step.update():
            optimizer.step()
        if WAY == "raise" and step.index == 1 and os.environ["RANK"] == "0":
            raise ValueError("on purpose")


train()
