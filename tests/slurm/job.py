"""A job that a user gives to Slurm with `sbatch`: what is done to it, and what is seen of it."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from midstep.launch.directories import HOME_VARIABLE

from ..chaos.jobs import TRAINING
from ..machines.engine_job import ROOMY, EngineJob
from ..machines.job import PATIENCE_S
from ..machines.machines import Machine
from .cluster import SlurmCluster

BATCH = ("--nodes=3", "--ntasks-per-node=1")
WITHOUT_SPARE = ("--nodes=2", "--ntasks-per-node=1")
NO_KILL = "--no-kill"  # of both commands: what is left is not ended for a machine that is lost
_POLL_S = 0.05
# Ends when the job has left the queue, with the code that Slurm keeps of it: `sbatch --wait` looks every few seconds.
_WAIT = """
while squeue --noheader --jobs "$1" --states all --format %T | grep -qE 'PENDING|RUNNING|COMPLETING|CONFIGURING'
do sleep 0.2; done
code=$(scontrol show job "$1" | sed -n 's/.*ExitCode=\\([0-9]*\\):\\([0-9]*\\).*/\\1 + \\2/p')
exit $((code))
"""


class End(msgspec.Struct, frozen=True):
    """How a job has ended, as Slurm says it."""

    state: str
    exit_code: str


class SlurmJob(EngineJob):
    """A job whose controller is on the first machine that Slurm has given it."""

    def __init__(
        self,
        cluster: SlurmCluster,
        root: Path,
        *,
        nodes: int = 2,
        steps: int = 60,
        step_s: float = 0.01,
        gates: Sequence[int] = (),
        batch: Sequence[str] = (*BATCH, NO_KILL),
        srun: Sequence[str] = (NO_KILL,),
    ) -> None:
        """`root`: a folder that all machines see. `batch`, `srun`: the options of `sbatch` and of `srun`."""
        self.cluster, self.machines, self.root = cluster, cluster.machines, root
        self.ranks = nodes
        self.records = root / "records"
        self.records.mkdir()
        for step in gates:
            self.gate(step).touch()
        policy = {**ROOMY, "checkpoint": {**ROOMY["checkpoint"], "directory": str(self.checkpoints)}}
        (root / "policy.yaml").write_text(yaml.safe_dump(policy))
        training = shlex.join((str(TRAINING), str(self.records), str(steps), str(step_s)))
        run = f"midstep run --nnodes {nodes} --nproc-per-node 1 --policy {root}/policy.yaml --rdzv-endpoint auto"
        script = root / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH {shlex.join(batch)}\n"
            "export MIDSTEP_TOKEN=$(midstep token)\n"
            f"srun {shlex.join(srun)} {run} {training}\n"
        )
        home = f"{HOME_VARIABLE}={root}/jobs"
        output = ("--open-mode=append", f"--output={root}/slurm.log")
        self.number = cluster.type("env", home, "sbatch", "--parsable", *output, str(script)).strip()
        self.name = self.number
        self.controller = self.machines[0].start(
            ("bash", "-c", _WAIT, "wait", self.number), environment=cluster.environment(), output=root / "wait.log"
        )

    @property
    def checkpoints(self) -> Path:
        """Where the policy has them written."""
        return self.root / "checkpoints"

    @property
    def directory(self) -> Path:
        """The job directory."""
        return self.root / "jobs" / self.name

    def steps_written(self, rank: int) -> int:
        """Return how many steps a rank has done, with those that it did again."""
        return len((self.records / f"steps.{rank}").read_text().splitlines())

    def printed(self) -> str:
        """Return what the job has printed."""
        log = self.root / "slurm.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def end(self) -> End:
        """Return how the job has ended."""
        fields = dict(
            word.split("=", 1)
            for word in self.cluster.type("scontrol", "show", "job", self.number).split()
            if "=" in word
        )
        return End(fields["JobState"], fields["ExitCode"])

    def cancel(self, *options: str) -> None:
        """Type `scancel`."""
        self.cluster.type("scancel", *options, self.number)

    def until_signalled(self) -> None:
        """Wait until the launcher with the controller has received SIGTERM."""
        self.cluster.until(lambda: "SIGTERM: asking" in self.printed(), "SIGTERM", self.printed)

    def until_queued_again(self) -> None:
        """Wait until Slurm has put it back into the queue; it is another job of midstep's from then on."""
        self.cluster.until(lambda: self.end().state == "PENDING", "the job to be queued again", lambda: f"{self.end()}")
        self.name = f"{self.number}-1"

    def start_again(self) -> None:
        """Have Slurm not wait for the two minutes that it gives a job which it has put back into the queue.

        It gives them for what it still has to tell the nodes. A late answer to "end this job" is taken for one of the
        job that has begun again, which then has a node less than it was given, and no step of it ever starts.
        """
        self.cluster.until_all_is_said()
        self.cluster.type("scontrol", "update", f"jobid={self.number}", "starttime=now")

    def said(self) -> str:
        """Return everything that was printed, for messages of failed tests."""
        logs = [self.root / "slurm.log", *sorted(self.root.glob("jobs/*/logs/*"))]
        printed = "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-4000:]}" for log in logs if log.exists())
        return f"{printed}\n{self.cluster.said()}"

    def assert_nothing_left(self) -> None:
        """No process of the job has outlived it."""
        deadline = time.monotonic() + PATIENCE_S
        for machine in self.machines:
            while machine.is_on and (left := _processes(machine)):
                assert time.monotonic() < deadline, f"left on {machine.name}: {left}\n{self.said()}"
                time.sleep(_POLL_S)

    def close(self) -> None:
        """End a job whose test failed."""
        if self.controller.poll() is None:
            self.cluster.type("scancel", "--signal=KILL", "--full", self.number, check=False)
            self.cluster.type("scancel", self.number, check=False)


def _processes(machine: Machine) -> list[str]:
    lines = machine.run("ps", "-A", "-o", "pid=,ppid=,comm=,args=", "-ww").splitlines()
    return [line for line in lines if "midstep" in line]
