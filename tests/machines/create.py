"""Runs on the controller's machine: makes the directories and the journal of a job, as `midstep run` does.

`create.py OPTIONS`, a JSON object; says where the run directory is, and holds it until the machine is off: that of a
launcher that has ended is removed when the next job begins.
"""

import json
import shutil
import signal
import sys
from pathlib import Path

from midstep.launch.job import Start, create_job


def main(options: dict[str, object]) -> None:
    """Make the job."""
    shared = Path(str(options.pop("shared")))
    start = Start(
        command=tuple(str(word) for word in options.pop("command")),  # type: ignore[attr-defined]
        policy_file=shared / "policy.yaml",
        job_directory=shared / "job",
        fixed_nodes=True,
        **options,  # type: ignore[arg-type]
    )
    made = create_job(start)
    shutil.rmtree(made.run_directory / "keys")  # those of a job on one machine; the controller makes them of the token
    print(made.run_directory, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
