"""The training of `training.py` where rank 0 alone has a callback of its own for repair, which calls midstep's.

Runs under `midstep run`: `differing.py RECORDS STEPS STEP_S`.
"""

import os
import sys
from pathlib import Path

from training import train  # type: ignore[import-not-found]

import midstep


def main() -> None:
    """Train as the command line says."""
    own = midstep.Lifecycle(repair=lambda recovery: recovery.default()) if os.environ["RANK"] == "0" else None
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), lifecycle=own)


if __name__ == "__main__":
    main()
