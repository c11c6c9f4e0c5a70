"""A script that never heard of midstep: writes down its environment, and fails in one rank at its first try.

Started by torchrun and by `midstep run` alike: `plain.py RECORDS [stubborn | lonely]`. A stubborn one fails every time,
a lonely one does not talk to the others.
"""

import json
import os
import sys
import time
from pathlib import Path

PATIENCE_S = 30.0  # for the other rank to begin


def main(records: Path, *, stubborn: bool, lonely: bool) -> None:
    """Write the environment down, add up the ranks, fail at the first try."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (records / f"environment.{rank}.{attempt}.json").write_text(json.dumps(dict(os.environ)))
    failing = rank == 1 and (stubborn or attempt == 0)
    if lonely:  # without torch, which torchrun would import in each process
        if failing:  # torchrun kills the other one then
            _wait_for(records / f"environment.0.{attempt}.json")
        sys.exit("on purpose" if failing else 0)
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(rank))
    dist.init_process_group("gloo")
    dist.all_reduce(total)
    if failing:
        sys.exit("on purpose")
    dist.barrier()
    (records / f"total.{rank}").write_text(str(total.item()))
    dist.destroy_process_group()


def _wait_for(path: Path) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), stubborn="stubborn" in sys.argv, lonely="lonely" in sys.argv)
