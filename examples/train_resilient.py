"""The same training, resilient: nine lines differ from train_plain.py. Start it with `midstep run`, or torchrun."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.examples.gpt import GPT, Shape, random_batch, standard_library_text

STEPS = 60


def main() -> None:
    """Train for STEPS steps, whatever happens to single processes."""
    midstep.init_process_group()
    shape, text = Shape(), standard_library_text()
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    torch.manual_seed(100 + dist.get_rank())
    state = midstep.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(STEPS):
            optimizer.zero_grad()
            loss = model(*random_batch(text, shape, 8))
            loss.backward()
            with step.update():
                optimizer.step()
                scheduler.step()
            if dist.get_rank() == 0:
                print(f"step {step.index} loss {loss.item():.4f}", flush=True)

    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
