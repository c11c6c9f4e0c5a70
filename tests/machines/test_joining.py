"""A job on machines that share nothing but the test's records: they join, one is powered off, a spare takes over."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from midstep.protocol.exits import NOT_ADMITTED
from midstep.protocol.token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, new_token, token_text

from .conftest import StartMachines
from .machines import Machine
from .network import Quality

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

MIDSTEP = (sys.executable, "-m", "midstep.cli.main")
TRAINING = Path(__file__).parents[1] / "chaos" / "training.py"
HOME = {"MIDSTEP_HOME": "/tmp/jobs"}  # each machine has a /tmp of its own
PATIENCE_S = 120.0
STEPS = 60
FOUR, APART_S = 4, 30.0
PLAIN = """import torch, torch.distributed as dist
dist.init_process_group("gloo")
found = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(found)
print("the sum is", found.item())
"""


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


def start(machine: Machine, token: Path, records: Path, output: Path, nodes: int = 2) -> subprocess.Popen[bytes]:
    """Run the command that is the same on all machines. Its environment names the file with the token."""
    meet = ("--rdzv-endpoint", "m0:29400", "--rdzv-id", "demo")
    shape = ("--nnodes", str(nodes), "--nproc-per-node", "1")
    words = (*MIDSTEP, "run", *shape, *meet, "--policy", str(records.parent / "policy.yaml"))
    environment = {**HOME, TOKEN_FILE_VARIABLE: str(token)}
    return machine.start(
        (*words, str(TRAINING), str(records), str(STEPS), "0.05"), environment=environment, output=output
    )


def make_ready(folder: Path) -> tuple[Path, Path]:
    """Make a folder for the records of a job, beside its policy, and its token."""
    records, token = folder / "records", folder / "job.token"
    records.mkdir()
    policy = {"checkpoint": {"directory": str(folder / "checkpoints"), "every_steps": 20}, "stall": {"grace_s": 600}}
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    write_token(token)
    return records, token


def write_token(file: Path, text: str | None = None) -> Path:
    """Write a token, a new one if none is given, into a file of its owner."""
    file.write_text(text or token_text(new_token()))
    file.chmod(0o600)
    return file


def test_machines_join_in_any_order_and_a_spare_takes_the_place_of_one_that_is_powered_off(
    start_machines: StartMachines, tmp_path: Path
) -> None:
    """The machine with the controller is the last one to come. Every step that is repeated gives the same bits."""
    machines = start_machines(3)
    records, token = make_ready(tmp_path)
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


@pytest.mark.parametrize("is_in_home", [False, True], ids=["in the environment", "in the home"])
def test_a_line_of_torchrun_s_runs_unchanged_on_two_machines_that_find_the_token_by_themselves(
    start_machines: StartMachines, tmp_path: Path, is_in_home: bool
) -> None:
    """As MIDSTEP_TOKEN, or as ~/.midstep/token in the home of each. The script is torchrun's as well."""
    machines, text = start_machines(2), token_text(new_token())
    line = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_endpoint=m0:29400", "--rdzv_id=demo")
    (tmp_path / "train.py").write_text(PLAIN)
    runs, outputs = [], [tmp_path / f"m{number}.txt" for number in range(2)]
    for machine, output in zip(machines, outputs, strict=True):
        home = tmp_path / output.stem
        (home / ".midstep").mkdir(parents=True)
        if is_in_home:
            write_token(home / ".midstep" / "token", text)
        environment = {**HOME, "HOME": str(home), **({} if is_in_home else {TOKEN_VARIABLE: text})}
        words = (*MIDSTEP, "run", *line, str(tmp_path / "train.py"))
        runs.append(machine.start(words, environment=environment, output=output))
    ended = [run.wait(PATIENCE_S) for run in runs]
    said = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in outputs)
    assert ended == [0, 0], said
    assert "[rank 0] the sum is 3" in said


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("quality", [None, Quality(delay_s=0.025, loss=0.01)], ids=["", "50 ms and 2 % loss"])
def test_four_machines_come_half_a_minute_apart_and_one_has_a_wrong_token(
    start_machines: StartMachines, tmp_path: Path, quality: Quality | None
) -> None:
    """The machine with the controller is the third one. The one that has no right to join is told so."""
    machines = start_machines(FOUR + 1)
    if quality is not None:
        for number in range(FOUR + 1):
            machines.network.worsen(number, msgspec.structs.replace(quality, seed=number))
    records, token = make_ready(tmp_path)
    outputs = [tmp_path / f"m{number}.txt" for number in range(FOUR + 1)]

    def said() -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in outputs if path.exists())

    (records / "gate.20").touch()
    runs = {}
    for number in (3, 1, 0, 2):
        runs[number] = start(machines[number], token, records, outputs[number], FOUR)
        time.sleep(APART_S if len(runs) < FOUR else 0.0)
    wrong = start(machines[FOUR], write_token(tmp_path / "wrong.token"), records, outputs[FOUR], FOUR)
    assert wrong.wait(PATIENCE_S) == NOT_ADMITTED, said()
    assert "the token is not that of job" in " ".join(outputs[FOUR].read_text().split())
    (records / "gate.20").unlink()
    assert [runs[number].wait(3 * PATIENCE_S) for number in range(FOUR)] == [0] * FOUR, said()
    lines = {path.name: path.read_text().splitlines() for path in records.glob("steps.*")}
    assert len(lines) == FOUR
    assert all(len(set(steps_of)) == STEPS for steps_of in lines.values()), "a step was repeated with other bits"
