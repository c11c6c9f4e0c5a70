"""A script that never heard of midstep: writes down its environment, and fails in one rank at its first try.

Started by torchrun and by `midstep run` alike: `plain.py RECORDS [stubborn]`. A stubborn one fails every time.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(records: Path, *, stubborn: bool) -> None:
    """Write the environment down, add up the ranks, fail at the first try."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (records / f"environment.{rank}.{attempt}.json").write_text(json.dumps(dict(os.environ)))
    dist.init_process_group("gloo")
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    if rank == 1 and (stubborn or attempt == 0):
        sys.exit("on purpose")
    dist.barrier()
    (records / f"total.{rank}").write_text(str(total.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), stubborn="stubborn" in sys.argv)
