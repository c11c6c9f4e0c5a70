"""A job on machines that share nothing but the test's records: they join, one is powered off, a spare takes over."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.token import new_token, token_text

from .conftest import StartMachines
from .machines import Machine

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

MIDSTEP = (sys.executable, "-m", "midstep.cli.main")
TRAINING = Path(__file__).parents[1] / "chaos" / "training.py"
HOME = {"MIDSTEP_HOME": "/tmp/jobs"}  # each machine has a /tmp of its own
PATIENCE_S = 120.0
STEPS = 60


def until(holds: Callable[[], bool], what: str, said: Callable[[], str]) -> None:
    """Wait for something that has to happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"still waiting for {what}:\n{said()}"
        time.sleep(0.2)


def steps(records: Path) -> int:
    """How many steps the rank that has come furthest has written down."""
    return max((len(path.read_text().splitlines()) for path in records.glob("steps.*")), default=0)


def status(machine: Machine) -> dict[str, Any]:
    """The job's status, as the machine with the controller says it."""
    said = machine.run(
        "env", *(f"{name}={value}" for name, value in HOME.items()), *MIDSTEP, "status", "--json", "demo"
    )
    answer: dict[str, Any] = json.loads(said)
    return answer


def start(machine: Machine, token: Path, records: Path, output: Path) -> subprocess.Popen[bytes]:
    """Run the command that is the same on all machines."""
    meet = ("--rdzv-endpoint", "m0:29400", "--rdzv-id", "demo", "--token-file", str(token))
    shape = ("--nnodes", "2", "--nproc-per-node", "1")
    words = (*MIDSTEP, "run", *shape, *meet, "--policy", str(records.parent / "policy.yaml"))
    return machine.start((*words, str(TRAINING), str(records), str(STEPS), "0.05"), environment=HOME, output=output)


def test_machines_join_in_any_order_and_a_spare_takes_the_place_of_one_that_is_powered_off(
    start_machines: StartMachines, tmp_path: Path
) -> None:
    """The machine with the controller is the last one to come. Every step that is repeated gives the same bits."""
    machines = start_machines(3)
    records, token = tmp_path / "records", tmp_path / "job.token"
    records.mkdir()
    (tmp_path / "policy.yaml").write_text(f"checkpoint: {{directory: {tmp_path / 'checkpoints'}, every_steps: 20}}\n")
    token.write_text(token_text(new_token()))
    token.chmod(0o600)
    outputs = [tmp_path / f"m{number}.txt" for number in range(3)]

    def said() -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in outputs if path.exists())

    (records / "gate.20").touch()
    runs = {number: start(machines[number], token, records, outputs[number]) for number in (1, 0)}
    until(lambda: steps(records) >= 5, "the first steps", said)
    runs[2] = start(machines[2], token, records, outputs[2])
    until(lambda: len(status(machines[0])["nodes"]) == 3, "the spare", said)
    assert {node["node"] for node in status(machines[0])["nodes"]} == {"m0", "m1", "m2"}
    machines[1].power_off()
    (records / "gate.20").unlink()

    assert [runs[number].wait(PATIENCE_S) for number in (0, 2)] == [0, 0], said()
    assert "all ranks have finished" in outputs[2].read_text()
    for path in records.glob("steps.*"):
        lines = set(path.read_text().splitlines())
        assert len(lines) == STEPS, f"{path.name}: a step was repeated with other bits"
