"""Resilient training that writes down what it did: every loss as exact bits, and a digest of the state at the end.

`midstep demo` runs it twice, undisturbed and under faults, and compares what was written.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.examples.gpt import GPT, Shape, random_batch, standard_library_text

Tensors = dict[str, torch.Tensor]


def digest(tensors: Tensors) -> str:
    """Return a hash of all tensors, bit for bit."""
    hashed = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode())
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state as named tensors."""
    return {
        f"{index}.{name}": value
        for index, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


def random_numbers(device: torch.device) -> Tensors:
    """Return the states of torch's generator and of the device's own."""
    states = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def main(directory: Path, steps: int) -> None:
    """Train for `steps` steps and write the record of this rank into `directory`."""
    midstep.init_process_group()
    device, shape = midstep.device(), Shape()
    torch.use_deterministic_algorithms(device.type != "cpu")  # what is compared bit for bit has to repeat itself
    rank, text = dist.get_rank(), standard_library_text()
    torch.manual_seed(1)
    with midstep.building():  # a newcomer's parameters come from a replica
        network = GPT(shape)
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    torch.manual_seed(100 + rank)
    state = midstep.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(steps):
            optimizer.zero_grad()
            inputs, targets = random_batch(text, shape, 4)
            loss = model(inputs.to(device), targets.to(device))
            loss.backward()
            # Before the update: a process that is lost after its commit does not come back to write this.
            with (directory / f"loss.{rank}").open("a") as record:
                record.write(f"{step.index} {loss.item().hex()}\n")
            step.report(loss=loss)
            with step.update():
                optimizer.step()
                scheduler.step()

    train()
    result = {
        "parameters": digest(dict(model.module.state_dict())),
        "optimizer": digest(optimizer_tensors(optimizer)),
        "random numbers": digest(random_numbers(device)),
    }
    (directory / f"digest.{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
