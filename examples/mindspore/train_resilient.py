"""The same training, resilient: ten lines differ from train_plain.py. Start it with `midstep run`."""

import mindspore as ms
import numpy as np
from mindspore import nn

import midstep
from midstep.adapters.mindspore import MindSporeState, average, get_rank
from midstep.examples.mindspore.network import Classifier, loss_and_gradients, random_batch

STEPS = 60


def main() -> None:
    """Train for STEPS steps, whatever happens to single processes."""
    ms.set_device("CPU")
    midstep.init_process_group()
    ms.set_seed(1)
    network = Classifier()
    optimizer = nn.Adam(network.trainable_params(), learning_rate=1e-3)
    gradients_of = loss_and_gradients(network, optimizer.parameters)
    np.random.seed(100 + get_rank())
    state = MindSporeState(network, optimizer)

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(STEPS):
            loss, gradients = gradients_of(*random_batch())
            gradients = average(gradients)
            with step.update():
                optimizer(gradients)
            if get_rank() == 0:
                print(f"step {step.index} loss {float(loss.asnumpy()):.4f}", flush=True)

    train()


if __name__ == "__main__":
    main()
