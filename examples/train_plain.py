"""Data-parallel training of a small GPT in plain PyTorch. Start it with torchrun, or with `midstep run`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from midstep.examples.gpt import GPT, Shape, random_batch, standard_library_text

STEPS = 60


def main() -> None:
    """Train for STEPS steps."""
    dist.init_process_group("gloo")
    shape, text = Shape(), standard_library_text()
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*random_batch(text, shape, 8))
        loss.backward()
        optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
