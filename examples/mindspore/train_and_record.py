"""Resilient training with MindSpore that writes down what it did: losses as exact bits, and digests at the end.

`midstep demo --mindspore` runs it twice, undisturbed and under faults, and compares what was written. What replaces a
process begins with other initial values on purpose: what it ends with came from a peer, or from a checkpoint.
"""

import json
import os
import random
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import xxhash
from mindspore import nn

import midstep
from midstep.adapters.mindspore import MindSporeState, average
from midstep.examples.mindspore.network import Classifier, loss_and_gradients, random_batch


class Mode(Enum):
    """How MindSpore runs the forward and backward pass, and the optimizer."""

    PYNATIVE = "pynative"
    JIT = "jit"
    GRAPH = "graph"


def digest(parameters: Any) -> str:
    """Return a hash of all parameters, bit for bit."""
    hashed = xxhash.xxh3_128()
    for name, parameter in sorted(parameters):
        hashed.update(name.encode())
        hashed.update(parameter.asnumpy().tobytes())
    return hashed.hexdigest()


def main(directory: Path, steps: int, mode: Mode) -> None:
    """Train for `steps` steps and write the record of this rank into `directory`."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE if mode is Mode.GRAPH else ms.PYNATIVE_MODE)
    midstep.init_process_group()
    rank, life = int(os.environ["RANK"]), int(os.environ["MIDSTEP_INCARNATION"])
    ms.set_seed(1 if life == 1 else 1000 + life)
    network = Classifier()
    optimizer = nn.Adam(network.trainable_params(), learning_rate=nn.cosine_decay_lr(1e-4, 1e-2, steps, steps, 1))
    gradients_of = loss_and_gradients(network, optimizer.parameters)
    if mode is Mode.JIT:
        gradients_of = ms.jit(gradients_of)
    np.random.seed(100 + rank + 1000 * life)
    random.seed(100 + rank + 1000 * life)
    position = {"batches": 1000 * (life - 1)}
    state = MindSporeState(network, optimizer, values={"position": position})

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(steps):
            position["batches"] += 1
            loss, gradients = gradients_of(*random_batch())
            gradients = average(gradients)
            # Before the update: a process that is lost after its commit does not come back to write this.
            with (directory / f"loss.{rank}").open("a") as record:
                record.write(f"{step.index} {float(loss.asnumpy()).hex()}\n")
            with step.update():
                optimizer(gradients)

    train()
    held = list(optimizer.parameters_and_names())
    result = {
        "parameters": digest(network.parameters_and_names()),
        "optimizer": digest(held),
        "global_step": [int(parameter.asnumpy()[0]) for name, parameter in held if name == "global_step"],
        "random numbers": [random.random(), *np.random.rand(2)],
        "data position": position["batches"],
    }
    (directory / f"digest.{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Mode(os.environ.get("MODE", "pynative")))
