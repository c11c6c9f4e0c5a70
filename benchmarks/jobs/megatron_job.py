"""One Megatron job under measurement: `megatron_job.py FOLDER STEPS REPLICA SIZE`.

Data parallel, with a distributed optimizer. Each rank writes its step times and its memory into FOLDER. REPLICA is a
kind of replica, or `plain` under torchrun; SIZE is the number of layers, width, heads and context, with commas.
"""

import functools
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from midstep.adapters.buddies import Buddies
from midstep.adapters.megatron import FromSample, resilient
from midstep.examples.megatron import gpt
from midstep.processor.ledger import Ledger

PARTS = {"send": Buddies.send, "arrive": Buddies.arrive, "peer_copy": Buddies.update, "commit": Ledger.enter_update}


def watch_parts(taken_s: dict[str, float]) -> None:
    """Add up the CPU time that the train thread spends in midstep's parts of a step; `commit` includes `arrive`."""

    def watched(name: str, plain: Any) -> Any:
        @functools.wraps(plain)
        def call(*args: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return plain(*args, **options)
            finally:
                taken_s[name] += time.thread_time() - began_s

        return call

    for name, plain in PARTS.items():
        owner = Ledger if plain is Ledger.enter_update else Buddies
        setattr(owner, plain.__name__, watched(name, plain))


def tensor_bytes() -> int:
    """Return the memory of all tensors that there are, each storage counted once."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in {torch.Tensor, torch.nn.Parameter}:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main(folder: Path, steps: int, replica: str, size: gpt.Size) -> None:
    """Train, and write down how long each step took, on the clock and of the CPU."""
    times: list[float] = []
    cpu_times: list[float] = []
    thread_times: list[float] = []
    memory: list[int] = []
    parts: list[dict[str, float]] = []
    taken_s = dict.fromkeys(PARTS, 0.0)
    watch_parts(taken_s)

    def train(job: gpt.Training, data_iterator: Any, iteration: int = 0) -> None:
        while iteration < steps:
            began_s, cpu_began_s, thread_began_s = time.perf_counter(), time.process_time(), time.thread_time()
            taken_s.update(dict.fromkeys(PARTS, 0.0))
            gpt.train_step(job, data_iterator)
            times.append(time.perf_counter() - began_s)
            cpu_times.append(time.process_time() - cpu_began_s)
            thread_times.append(time.thread_time() - thread_began_s)
            parts.append(dict(taken_s))
            iteration += 1
        memory.append(tensor_bytes())

    run = train if replica == "plain" else resilient(replica=replica)(train)
    instances = 2 if replica == "instances" else 1
    gpt.start(instances=instances)
    job = gpt.build(distributed=True, instances=instances, size=size)
    run(job, FromSample(functools.partial(gpt.batches, context=size.context)))
    note = {
        "times_s": times,
        "cpu_times_s": cpu_times,
        "thread_times_s": thread_times,
        "parts_s": parts,
        "tensor_bytes": memory[-1],
        "resident_bytes": psutil.Process().memory_info().rss,
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
    }
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(note))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], gpt.Size(*map(int, sys.argv[4].split(","))))
