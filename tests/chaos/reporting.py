"""The training of these tests, with a detector in it: a file `unwell.NODE` among the records is reported as sub-health.

Runs under `midstep run`: `reporting.py RECORDS STEPS STEP_S`.
"""

import sys
import threading
import time
from pathlib import Path

import training  # type: ignore[import-not-found]  # beside this file, which runs as a script

from midstep.processor.runtime import Runtime
from midstep.protocol.messages import FaultReported
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

LOOK_S = 0.05


def detect(runtime: Runtime, records: Path) -> None:
    """Report each node once."""
    reported: set[str] = set()
    while True:
        for path in records.glob("unwell.*"):
            node = path.suffix[1:]
            if node not in reported:
                reported.add(node)
                level, assertion = FaultLevel.SUB_HEALTH, Assertion.OCCUR
                report = FaultReport(
                    FaultKind.NODE, time.time(), "test", "fan 2 is slow", node=node, level=level, assertion=assertion
                )
                runtime.post(FaultReported(report))
        time.sleep(LOOK_S)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    this = Runtime.current()
    if this is not None and this.rank == 0:
        threading.Thread(target=detect, args=(this, directory), daemon=True).start()
    training.train(directory, int(sys.argv[2]), float(sys.argv[3]))
