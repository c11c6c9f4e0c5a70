"""The training of `training.py` with all five lifecycle callbacks replaced by ones that write down that they ran.

Runs under `midstep run`: `own_callbacks.py RECORDS STEPS STEP_S [RANK PHASE:STEP...]`. That rank's callback of each of
these phases raises a ValueError once, in the first recovery at or after that step.
"""

import sys
import threading
from pathlib import Path

from training import train  # type: ignore[import-not-found]

import midstep

PHASES = ("stop", "clean", "rebuild", "repair", "rollback")


def main() -> None:
    """Train as the command line says."""
    records = Path(sys.argv[1])
    failing_rank = int(sys.argv[4]) if len(sys.argv) > 4 else None
    fails_from = {phase: int(step) for phase, step in (given.split(":") for given in sys.argv[5:])}

    def callback(recovery: midstep.Recovery) -> None:
        thread = "train" if threading.current_thread() is threading.main_thread() else "control"
        with (records / f"callbacks.{recovery.rank}").open("a") as lines:
            lines.write(f"{recovery.phase} {recovery.generation} {recovery.step} {thread}\n")
        phase = recovery.phase.value
        if recovery.rank == failing_rank and phase in fails_from and recovery.step >= fails_from[phase]:
            raised = records / f"raised.{phase}"
            if not raised.exists():
                raised.touch()
                raise ValueError("this callback does not work")
        recovery.default()

    lifecycle = midstep.Lifecycle(**dict.fromkeys(PHASES, callback))
    train(records, int(sys.argv[2]), float(sys.argv[3]), lifecycle=lifecycle)


if __name__ == "__main__":
    main()
