"""`--nnodes 1:4`: a job that begins on one machine, grows as others come, and gets smaller when some are lost."""

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from midstep.protocol.token import new_token, token_text

from ..chaos.divided import BATCH, dataset
from .conftest import StartMachines
from .machines import Machine, Machines
from .test_joining import HOME, MIDSTEP, PATIENCE_S, status, until

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

DIVIDED = Path(__file__).parents[1] / "chaos" / "divided.py"
STEPS, STEP_S = 170, 0.05
GATES = (10, 60, 110)  # steps at which the world is held; a boundary lies a second, or 20 steps, ahead
POLICY = "scale: {{min_interval_s: 0}}\ncheckpoint: {{directory: {checkpoints}}}\n"


class ElasticJob:
    """The job, its machines, and what they have written down."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines = machines
        self.folder = folder
        self.records = folder / "records"
        self.records.mkdir()
        self.token, self.policy = folder / "job.token", folder / "policy.yaml"
        self.policy.write_text(POLICY.format(checkpoints=folder / "checkpoints"))
        self.token.write_text(token_text(new_token()))
        self.token.chmod(0o600)
        for step in GATES:
            self._gate(step).touch()

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Run the command that is the same on all machines."""
        meet = ("--rdzv-endpoint", "m0:29400", "--rdzv-id", "demo", "--token-file", str(self.token))
        shape = ("--nnodes", "1:4", "--nproc-per-node", "1", "--rdzv-conf", "last_call_timeout=1")
        script = (str(DIVIDED), str(self.records), str(STEPS), str(STEP_S))
        words = (*MIDSTEP, "run", *shape, *meet, "--policy", str(self.policy), *script)
        return self.machines[number].start(words, environment=HOME, output=self.folder / f"m{number}.txt")

    def open_gate(self, step: int) -> None:
        """Let all ranks go past a step."""
        self._gate(step).unlink()

    def until(self, phase: str, ranks: int) -> None:
        """Wait for a phase of a world of so many ranks."""

        def holds() -> bool:
            now = status(self.controller)
            return now["phase"] == phase and len(now["ranks"]) == ranks

        until(holds, f"{phase} with {ranks} ranks", self.said)

    def until_held(self, step: int) -> None:
        """Wait until all ranks stand at the gate of a step: what they have committed is written down by then."""
        until(lambda: {each["step"] for each in status(self.controller)["ranks"]} == {step}, f"step {step}", self.said)

    def until_it_grows(self, ranks: int) -> None:
        """Wait until a world of so many ranks is to grow, or has: it pauses before the gate where that is quick."""

        def holds() -> bool:
            now = status(self.controller)
            return len(now["ranks"]) > ranks or (now["phase"] == "pausing" and len(now["ranks"]) == ranks)

        until(holds, f"more than {ranks} ranks", self.said)

    @property
    def controller(self) -> Machine:
        """The machine with the controller."""
        return self.machines[0]

    def machines_of(self, *ranks: int) -> set[int]:
        """The numbers of the machines on which ranks run; none of them has the controller."""
        nodes = {rank["rank"]: rank["node"] for rank in status(self.controller)["ranks"]}
        found = {int(nodes[rank].removeprefix("m")) for rank in ranks}
        assert len(found - {0}) == len(ranks), nodes
        return found

    def said(self) -> str:
        """What the machines have shown."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("m?.txt")))

    def incidents(self) -> list[dict[str, Any]]:
        """The job's incidents, from its status."""
        found: list[dict[str, Any]] = status(self.controller)["incidents"]
        return found

    def restarts_paid(self) -> int:
        """How much of the budget of `reschedule_pod` is used, from the job's status."""
        used = {use["name"]: use["used"] for use in status(self.controller)["budgets"]}
        return int(used["reschedule_pod per job"])

    def samples_by_step(self) -> dict[int, list[int]]:
        """What all ranks together have learned from, by step."""
        learned: dict[int, list[int]] = {}
        for path in self.records.glob("samples.*"):
            for line in path.read_text().splitlines():
                step, _, samples = line.partition(": ")
                learned.setdefault(int(step), []).extend(map(int, samples.split()))
        return learned

    def _gate(self, step: int) -> Path:
        return self.records / f"gate.{step}"


def test_a_job_grows_from_one_machine_to_four_loses_two_at_once_and_gets_another(
    start_machines: StartMachines, tmp_path: Path
) -> None:
    """1, 4, 2, and 3: no committed step is lost, each sample is learned from once, and only losses take a budget."""
    job = ElasticJob(start_machines(5), tmp_path)
    runs = {0: job.start(0)}
    until((job.records / "samples.0").exists, "the first step on one machine", job.said)
    runs |= {number: job.start(number) for number in (1, 2, 3)}
    job.until_it_grows(1)
    job.open_gate(GATES[0])
    job.until("running", 4)
    assert job.restarts_paid() == 0, job.incidents()
    job.until_held(GATES[1])
    lost = job.machines_of(1, 3)  # each has the copy of its own state on a machine that stays
    for number in lost:
        job.machines[number].power_off()
    job.open_gate(GATES[1])
    job.until("running", 2)
    paid = job.restarts_paid()
    assert paid > 0, job.incidents()
    runs[4] = job.start(4)
    job.until_it_grows(2)
    job.open_gate(GATES[2])

    assert [run.wait(PATIENCE_S) for number, run in runs.items() if number not in lost] == [0, 0, 0], job.said()
    changes = job.incidents()
    assert job.restarts_paid() == paid, changes
    assert {change["outcome"] for change in changes} <= {"resumed", "dismissed"}, changes  # a gate looks like a stall
    resumed = [change for change in changes if change["outcome"] == "resumed"]
    assert all(change["resumed_step"] >= change["committed_before"] for change in resumed), changes
    learned = job.samples_by_step()
    assert sorted(learned) == list(range(STEPS))
    sizes = [len(learned[step]) // BATCH for step in range(STEPS)]
    worlds = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    # Those that come, or are noticed as lost, a little later than another are one more change.
    assert [worlds[0], *(size for size in worlds if size == 4), *worlds[-2:]] == [1, 4, 2, 3], worlds
    seen = [sample for step in range(STEPS) for sample in learned[step]]
    order: list[int] = list(DistributedSampler(dataset(), num_replicas=1, rank=0, shuffle=True, seed=5))
    assert Counter(seen) == Counter(order[: len(seen)])
