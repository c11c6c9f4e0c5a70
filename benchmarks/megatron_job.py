"""One Megatron job under measurement: `megatron_job.py FOLDER STEPS REPLICA`, data parallel, distributed optimizer.

Each rank writes its step times and its memory into FOLDER. REPLICA is a kind of replica, or `plain` under torchrun.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from midstep.adapters.megatron import FromSample, resilient
from midstep.examples.megatron import gpt


def main(folder: Path, steps: int, replica: str) -> None:
    """Train, and write down how long each step took."""
    times: list[float] = []

    def train(job: gpt.Job, data_iterator: Any, iteration: int = 0) -> None:
        while iteration < steps:
            began_s = time.perf_counter()
            gpt.train_step(job, data_iterator)
            times.append(time.perf_counter() - began_s)
            iteration += 1

    run = train if replica == "plain" else resilient(replica=replica)(train)
    instances = 2 if replica == "instances" else 1
    gpt.start(instances=instances)
    run(gpt.build(distributed=True, instances=instances), FromSample(gpt.batches))
    note = {"times_s": times, "memory_bytes": psutil.Process().memory_info().rss}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(note))
    dist.destroy_process_group()


if __name__ == "__main__":
    # Megatron is imported later, and must not be the benchmark of that name beside this file.
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
