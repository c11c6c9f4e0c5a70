"""Data-parallel training of a small classifier in plain MindSpore. Start it with msrun."""

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank, init

from midstep.examples.mindspore.network import Classifier, loss_and_gradients, random_batch

STEPS = 60


def main() -> None:
    """Train for STEPS steps."""
    ms.set_device("CPU")
    init()
    ms.set_seed(1)
    network = Classifier()
    optimizer = nn.Adam(network.trainable_params(), learning_rate=1e-3)
    gradients_of = loss_and_gradients(network, optimizer.parameters)
    average = nn.DistributedGradReducer(optimizer.parameters)
    np.random.seed(100 + get_rank())
    for step in range(STEPS):
        loss, gradients = gradients_of(*random_batch())
        gradients = average(gradients)
        optimizer(gradients)
        if get_rank() == 0:
            print(f"step {step} loss {float(loss.asnumpy()):.4f}", flush=True)


if __name__ == "__main__":
    main()
