"""The training of `training.py`, whose steps take time of their own, which a rank or its data loader can take more of.

Runs under `midstep run`: `slowed.py RECORDS STEPS WORK_S HOW`. The work is many short sleeps, so that it takes as long
on a busy machine. HOW is JSON: `loader_s`: what the samples of rank 1 take; `spins`: real work instead, so many times.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training import augmented, train  # type: ignore[import-not-found]

NAP_S = 0.002


def main() -> None:
    """Train, with work in each step."""
    records, steps, work_s, how = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
    matrix = torch.ones(64, 64)
    torch.set_num_threads(1)

    def augment(samples: torch.Tensor) -> torch.Tensor:
        for _ in range(how.get("spins", 0)):
            torch.mm(matrix, matrix)
        for _ in range(round(work_s / NAP_S)):
            time.sleep(NAP_S)
        return augmented(samples)  # type: ignore[no-any-return]

    if how.get("loader_s"):
        plain: Any = torch.utils.data.TensorDataset.__getitem__

        def late(dataset: Any, index: int) -> Any:
            if dist.get_rank() == 1:
                time.sleep(how["loader_s"])
            return plain(dataset, index)

        torch.utils.data.TensorDataset.__getitem__ = late  # type: ignore[method-assign]
    train(records, steps, 0.0, augment=augment)


if __name__ == "__main__":
    main()
