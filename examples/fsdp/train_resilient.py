"""The same training, resilient: nine lines differ from train_plain.py. Start it with `midstep run`, or torchrun."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import midstep
from midstep.examples.gpt import GPT, Shape, random_batch, standard_library_text

STEPS = 60
ROWS = 2  # of the mesh; each has all parameters, over its ranks


def main() -> None:
    """Train for STEPS steps, whatever happens to single processes."""
    midstep.init_process_group()
    columns = dist.get_world_size() // ROWS
    mesh = init_device_mesh("cpu", (ROWS, columns), mesh_dim_names=("replicate", "shard"))
    shape, text = Shape(), standard_library_text()
    torch.manual_seed(1)
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with step.update():
                optimizer.step()
                scheduler.step()
            if dist.get_rank() == 0:
                print(f"step {step.index} loss {loss.item():.4f}", flush=True)

    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
