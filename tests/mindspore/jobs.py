"""Jobs of the MindSpore tests: `midstep run` with the demo's script, as a user starts it."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

import midstep
from midstep.controller.journal.reading import read_status
from midstep.protocol.incidents import Incident, Outcome

RANKS = 4
LIMIT_S = 300.0
SCHEDULER = "midstep-sched"
SCRIPT = Path(midstep.__file__).parent / "examples" / "mindspore" / "train_and_record.py"
# Room for many recoveries on a busy machine.
POLICY: dict[str, Any] = {
    "ladder": [
        {"rung": "retry_step", "attempts": 8, "budget": {"per_job": 1000}},
        {"rung": "recover_in_place", "attempts": 8, "budget": {"per_job": 1000}},
        {"rung": "recover", "attempts": 8, "budget": {"per_job": 1000}},
        {"rung": "reschedule_job", "attempts": 2},
        {"rung": "stop"},
    ],
    "communicator": {"name": "tcp"},
    "standby": {"preload": ["mindspore"]},
    "checkpoint": {"every_steps": 5},
    "stall": {"grace_s": 15.0},
    "heartbeat": {"missed": 20},
    "incident": {"max_attempts": 20},
}


class Job:
    """One job on one node, under way in the background."""

    def __init__(self, root: Path, *, options: Sequence[str], script: Path, arguments: Sequence[str]) -> None:
        """Start it; `arguments` come behind the folder of its records."""
        self.directory, self.records = root / "job", root / "records"
        self.records.mkdir(parents=True, exist_ok=True)
        policy = root / "policy.yaml"
        policy.write_text(yaml.safe_dump(POLICY))
        self.said = ""
        self._log = (root / "log").open("w+")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "midstep.cli.main", "run", "--job-dir", str(self.directory)),
                *("--nproc-per-node", str(RANKS), "--policy", str(policy)),
                *("--env", "GLOG_v=3", *options, str(script), str(self.records), *arguments),
            ],
            cwd=root,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def pid(self) -> int:
        """The pid of `midstep run`."""
        return self._process.pid

    @classmethod
    def of_the_demo(cls, root: Path, *, mode: str, steps: int, faults: list[dict[str, Any]]) -> "Job":
        """Start the demo's script in a mode of MindSpore's."""
        root.mkdir(parents=True)
        schedule = root / "faults.yaml"
        schedule.write_text(yaml.safe_dump({"faults": faults}))
        options = ["--env", f"MODE={mode}", *(("--faults", str(schedule)) if faults else ())]
        return cls(root, options=options, script=SCRIPT, arguments=[str(steps)])

    def midstep(self, command: str) -> None:
        """Run a command of midstep's on this job."""
        given = [sys.executable, "-m", "midstep.cli.main", command, str(self.directory)]
        subprocess.run(given, check=True, capture_output=True, timeout=LIMIT_S)

    def finish(self, expected: int = 0) -> list[Incident]:
        """Wait for a job that has to end with this exit code, and return its incidents."""
        try:
            status = self._process.wait(LIMIT_S)
        finally:
            self._process.kill()
            self._log.seek(0)
            self.said = self._log.read()
            self._log.close()
        assert status == expected, self.said[-6000:]
        incidents = read_status(self.directory).incidents
        return [incident for incident in incidents if incident.outcome is not Outcome.DISMISSED]


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def schedulers(job: Job) -> list[psutil.Process]:
    """The schedulers that run now, of this job."""
    return processes(job, SCHEDULER)


def processes(job: Job, name: str) -> list[psutil.Process]:
    """The processes of this job that run now under a name."""
    below = psutil.Process(job.pid).children(recursive=True)
    return [each for each in below if each.is_running() and each.name() == name]
