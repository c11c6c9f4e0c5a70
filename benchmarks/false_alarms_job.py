"""The job that `false_alarms.py` watches: the example's training, with a data loader that is slow now and then.

`false_alarms_job.py STEPS LOADER`. The pauses of the loader `random` come by chance, those of `regular` in each so many
steps, other ones on each rank. `rare` pauses for three times as long in one step of two thousand, and says so.
"""

import sys
import time
from contextlib import nullcontext

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
RARE_S, RARE_EVERY = 3 * PAUSE_S, 2000
LOADERS = ("random", "regular", "rare")
SHAPE = Shape(layers=2, heads=2, width=32, context=32)


class SlowLoader:
    """Batches that come late, by other times on each rank and in each step."""

    def __init__(self, text: Tensor, kind: str) -> None:
        self._text, self._kind = text, kind
        self._weather = torch.Generator().manual_seed(7 + dist.get_rank())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step, after some time."""
        late, chance = torch.rand(2, generator=self._weather).tolist()
        late_s = -MEAN_S * float(torch.log1p(torch.tensor(-late)))
        turn = step + 37 * dist.get_rank()
        if self._kind == "random":
            pause_s = PAUSE_S if chance * PAUSES_EVERY < 1 else 0.0
        elif self._kind == "regular":
            pause_s = PAUSE_S if turn % PAUSES_EVERY == 0 else 0.0
        else:
            pause_s = RARE_S if turn % RARE_EVERY == 0 else 0.0
        time.sleep(PLAIN_S + late_s + pause_s)
        return random_batch(self._text, SHAPE, 4)


def main(steps: int, kind: str) -> None:
    """Train for so many steps."""
    midstep.init_process_group()
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + dist.get_rank())
    state = midstep.TrainState(model=model, optimizer=optimizer)
    loader = SlowLoader(standard_library_text(), kind)

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(steps):
            optimizer.zero_grad()
            with step.loading() if kind == "rare" else nullcontext():
                batch = loader.batch(step.index)
            model(*batch).backward()
            with step.update():
                optimizer.step()

    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
