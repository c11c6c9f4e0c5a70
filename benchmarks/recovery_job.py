"""The job that `recovery.py` measures: a GPT of ten million parameters, of which one rank is killed once.

One script for all: resilient under `midstep run`; under torchrun plain, with a checkpoint every few steps; under
torchft with its manager, optimizer and DDP.
"""

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import midstep
from midstep.benchmarks.launching import DEVICE, REPLICA
from midstep.benchmarks.records import VOTED, Recorder, kill_once
from midstep.examples.gpt import GPT, TEN_MILLION, VOCABULARY, Shape
from midstep.processor.runtime import Runtime

CHECKPOINT_EVERY_STEPS = 10
VICTIM = 1
STATE_BYTES = 126_000_000  # parameters and Adam's state
WHOLE = "MIDSTEP_BENCH_INITIAL_VALUES"  # set: newcomers compute initial values, too
PIECE_BYTES = 4 * 1024 * 1024
TRANSPORTS = 5
TORCHFT_COLLECTIVE_S, TORCHFT_S = 2.0, 10.0  # as it comes: 60 s each

RANK = int(os.environ.get(REPLICA, os.environ["RANK"]))
SHAPES = {"ten_million": TEN_MILLION, "eighty_million": Shape(layers=6, heads=8, width=1072, dropout=0.0)}
SHAPE = SHAPES[sys.argv[4] if __name__ == "__main__" and len(sys.argv) > 4 else "ten_million"]  # others import this


def own_device() -> torch.device:
    """Return the device of this rank."""
    return midstep.device() if DEVICE in os.environ else torch.device("cpu")


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's one sequence of a step; it depends on nothing but step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    window = torch.randint(VOCABULARY, (1, SHAPE.context + 1), generator=generator)
    window = window.to(own_device())
    return window[:, :-1], window[:, 1:]


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Make what is trained."""
    torch.manual_seed(1)
    with contextlib.nullcontext() if os.environ.get(WHOLE) else midstep.building():
        network = GPT(SHAPE)
    model = DistributedDataParallel(network.to(own_device()))
    return model, torch.optim.Adam(model.parameters(), lr=3e-4)


def resilient(directory: Path, total: int, killed_step: int, recorder: Recorder) -> None:
    """Train under midstep."""
    midstep.init_process_group()
    recorder.mark("group")
    model, optimizer = build()
    state = midstep.TrainState(model=model, optimizer=optimizer)
    recorder.mark("model and optimizer")

    @midstep.resilient(state)
    def train() -> None:
        for step in state.steps(total):
            optimizer.zero_grad()
            loss = model(*step.inputs(batch(step.index)))
            if step.index == killed_step and RANK == VICTIM:
                kill_once(directory)
            loss.backward()
            with step.update():
                optimizer.step()
            recorder.step(step.index)
            if voted() == step.index:
                recorder.note(VOTED, step.index)

    train()
    measure_transport(recorder)


def voted() -> int:
    """Return the newest state that has passed a vote: it was held in the step with that number."""
    runtime = Runtime.current()
    assert runtime is not None
    progress = runtime.black_box.read_progress(time.monotonic())
    return 0 if progress is None else progress.agreed_step


def measure_transport(recorder: Recorder) -> None:
    """Note what the communicator moves to the victim when nothing else is done: as much, from where repair takes it."""
    runtime = Runtime.current()
    assert runtime is not None
    links, near = runtime.communicator, [rank for rank in range(runtime.ranks_per_node) if rank != VICTIM]
    sources = near or [0]
    pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(STATE_BYTES // PIECE_BYTES // len(sources))]
    for _ in range(TRANSPORTS):
        links.barrier()
        began_s = time.monotonic()
        if RANK == VICTIM:
            handles = [links.irecv(piece, source) for piece in pieces for source in sources]
        else:
            handles = [links.isend(piece, VICTIM) for piece in pieces if RANK in sources]
        for handle in handles:
            handle.wait()
        if RANK == VICTIM:
            moved = PIECE_BYTES * len(pieces) * len(sources)
            recorder.note("transport_bytes_per_s", moved / (time.monotonic() - began_s))


def plain(directory: Path, total: int, killed_step: int, recorder: Recorder) -> None:
    """Train under torchrun, from the checkpoint if there is one."""
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    recorder.mark("group")
    model, optimizer = build()
    recorder.mark("model and optimizer")
    checkpoint, first = directory / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        recorder.mark("load")
    for step in range(first, total):
        optimizer.zero_grad()
        loss = model(*batch(step))
        if step == killed_step and RANK == VICTIM:
            kill_once(directory)
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        recorder.step(step)
        if killed_step >= 0 and (step + 1) % CHECKPOINT_EVERY_STEPS == 0 and RANK == 0:
            draft = checkpoint.with_suffix(".new")
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(saved, draft)
            draft.rename(checkpoint)


def healing(total: int, killed_step: int, directory: Path, recorder: Recorder) -> None:
    """Train under torchft: a step in which the groups have changed is repeated, and a newcomer is sent the state."""
    import torchft

    replicas, device = int(os.environ["NUM_REPLICA_GROUPS"]), own_device()
    kind = torchft.ProcessGroupGloo
    if device.type == "cuda":
        torch.cuda.set_device(device)
        kind = torchft.ProcessGroupNCCL
    torch.manual_seed(1)
    network = GPT(SHAPE).to(device)
    plain_optimizer = torch.optim.Adam(network.parameters(), lr=3e-4)

    def state_dict() -> dict[str, Any]:
        return {"model": network.state_dict(), "optimizer": plain_optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        plain_optimizer.load_state_dict(state["optimizer"])

    recorder.mark("model and optimizer")
    manager = torchft.Manager(
        pg=kind(timeout=timedelta(seconds=TORCHFT_COLLECTIVE_S)),
        min_replica_size=replicas,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{RANK}",
        use_async_quorum=False,  # else a newcomer's first step is lost, and the world differs in it
        timeout=timedelta(seconds=TORCHFT_S),
    )
    model = torchft.DistributedDataParallel(manager, network)
    optimizer = torchft.Optimizer(manager, plain_optimizer)
    while manager.current_step() < total:
        optimizer.zero_grad()  # here the groups agree on who trains
        step = manager.current_step()
        loss = model(*batch(step))
        if step == killed_step and RANK == VICTIM:
            kill_once(directory)
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if manager.current_step() > step:
            recorder.step(step)
    manager.shutdown()


def main() -> None:
    """Take the directory for the notes, the number of steps, the step in which to be killed, and a name in `SHAPES`.

    A negative step: nobody is killed, and the plain script writes no checkpoints.
    """
    directory, total, killed_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    recorder = Recorder(directory, RANK)
    recorder.mark("process")
    if REPLICA in os.environ:
        healing(total, killed_step, directory, recorder)
        return
    train = resilient if "MIDSTEP_JOB" in os.environ else plain
    train(directory, total, killed_step, recorder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
