"""The job that `false_alarms.py` watches: the example's training, with a data loader that is slow now and then."""

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.examples.gpt import GPT, Shape, random_batch, standard_library_text

PLAIN_S = 0.002  # that the data of a step is waited for, at least
MEAN_S = 0.005  # and beyond that, at the mean
PAUSE_S = 0.25  # in one step of `PAUSES_EVERY`, as where the next file is opened
PAUSES_EVERY = 100
SHAPE = Shape(layers=2, heads=2, width=32, context=32)


class SlowLoader:
    """Batches that come late, by other times on each rank and in each step."""

    def __init__(self, text: Tensor) -> None:
        self._text = text
        self._weather = torch.Generator().manual_seed(7 + dist.get_rank())

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch, after some time."""
        late, pause = torch.rand(2, generator=self._weather).tolist()
        late_s = -MEAN_S * float(torch.log1p(torch.tensor(-late)))
        time.sleep(PLAIN_S + late_s + (PAUSE_S if pause * PAUSES_EVERY < 1 else 0.0))
        return random_batch(self._text, SHAPE, 4)


def main(steps: int) -> None:
    """Train for so many steps."""
    midstep.init_process_group()
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + dist.get_rank())
    state = midstep.TrainState(model=model, optimizer=optimizer)
    loader = SlowLoader(standard_library_text())

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(steps):
            optimizer.zero_grad()
            model(*loader.batch()).backward()
            with step.update():
                optimizer.step()

    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
