"""Eight ranks of a sharded model on two machines: one is lost at moments of a step, and then a machine with four."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from midstep.protocol import environment as names
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.fsdp.conftest import HELD, POLICY, TRAINING
from ..chaos.fsdp.training import AFTER_BACKWARD, BEFORE_FORWARD, Ending, Setting
from ..chaos.jobs import Job, Record, read_record
from ..chaos.losing import calm_record
from .conftest import StartMachines
from .machines import Machine, Machines
from .test_joining import HOME, MIDSTEP, write_token

pytestmark = [pytest.mark.machines, pytest.mark.timeout(900)]

PATIENCE_S = 300.0
ROWS, COLUMNS = 2, 4  # a row is a machine, and holds all pieces
WORLD = ROWS * COLUMNS
VICTIM = 5
ROW, COLUMN = (4, 5, 6, 7), (1, 5)  # the groups of the victim
FIRST, STRIDE = 3, 2  # steps of the incidents
Moment = dict[str, Any]


def collective(operation: str, group: tuple[int, ...]) -> Moment:
    """Return the beginning of a collective, as the arguments of a fault."""
    return {"point": InjectionPoint.COLLECTIVE, "operation": operation, "group": group}


GATHER, SCATTER = collective("all_gather_single", ROW), collective("reduce_scatter_single", ROW)
SOME: tuple[Moment, ...] = (GATHER, SCATTER, {"point": InjectionPoint.UPDATE})
ALL: tuple[Moment, ...] = (
    {"place": BEFORE_FORWARD},
    GATHER,
    {"point": InjectionPoint.FORWARD},
    {"point": InjectionPoint.BACKWARD},
    SCATTER,
    collective("allreduce", COLUMN),  # of gradients, between the rows
    {"place": AFTER_BACKWARD},
    collective("allreduce", ROW),  # of the norm, by which gradients are clipped
    {"point": InjectionPoint.BARRIER},
    {"point": InjectionPoint.UPDATE},
    {"point": InjectionPoint.FORWARD, "action": FaultAction.STOP},
    {"point": InjectionPoint.BACKWARD, "action": FaultAction.RAISE},
)


class ShardedJob:
    """A job whose command is the same on each of three machines, of which the last one is a spare."""

    def __init__(self, machines: Machines, folder: Path, setting: Setting, faults: Sequence[ArmedFault]) -> None:
        self.records, self._folder, self._machines = folder / "records", folder, machines
        self._token = write_token(folder / "job.token")
        checkpoint = {**POLICY["checkpoint"], "directory": str(folder / "checkpoints")}
        (folder / "policy.yaml").write_text(yaml.safe_dump({**POLICY, "checkpoint": checkpoint, "stall": HELD}))
        self._environment = {**HOME, names.FAULTS: msgspec.json.encode(list(faults)).decode(), "OMP_NUM_THREADS": "1"}
        self._arguments = (str(TRAINING), str(self.records), msgspec.json.encode(setting).decode())
        self._runs = {number: self._start(machines[number]) for number in range(ROWS)}
        self.until(lambda status: len(status["nodes"]) == ROWS, "the nodes")
        self._runs[ROWS] = self._start(machines[ROWS])

    def _start(self, machine: Machine) -> Any:
        meet = ("--rdzv-endpoint", "m0:29400", "--rdzv-id", "sharded", "--token-file", str(self._token))
        shape = ("--nnodes", str(ROWS), "--nproc-per-node", str(COLUMNS))
        words = (*MIDSTEP, "run", *shape, *meet, "--policy", str(self._folder / "policy.yaml"), *self._arguments)
        return machine.start(words, environment=self._environment, output=self._folder / f"{machine.name}.txt")

    def _ask(self, *words: str) -> Any:
        given = [f"{name}={value}" for name, value in HOME.items()]
        said = self._machines[0].run("env", *given, *MIDSTEP, *words, "--json", "sharded", check=False)
        return json.loads(said) if said.startswith("{") else None

    def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Wait until the status is as wanted."""
        deadline = time.monotonic() + PATIENCE_S
        while (status := self._ask("status")) is None or not holds(status):
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{status}\n{self.said()}"
            time.sleep(0.5)

    def held_after(self, incidents: int, step: int) -> None:
        """Wait until so many incidents are over, and all ranks in front of this step."""

        def held(status: dict[str, Any]) -> bool:
            over = len(status["incidents"]) == incidents and status["phase"] == "running"
            return over and all(rank["step"] == step for rank in status["ranks"])

        self.until(held, f"all ranks at the gate of step {step}")

    def open_gate(self, step: int) -> None:
        """Let ranks go into a step."""
        (self.records / f"gate.{step}").unlink()

    def finish(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Wait for the commands on these machines, and return the incidents."""
        assert [self._runs[number].wait(PATIENCE_S) for number in numbers] == [0] * len(numbers), self.said()
        incidents: list[dict[str, Any]] = self._ask("report")["incidents"]
        return incidents

    def said(self) -> str:
        """What all commands have said."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("m*.txt")))


def undisturbed(root: Path, setting: Setting) -> Record:
    """Return the record of a run to which nothing happens, on this computer."""
    arguments = [str(root / "records"), msgspec.json.encode(setting).decode()]
    options: dict[str, Any] = {"nodes": 1, "ranks_per_node": WORLD, "policy": POLICY}
    job = Job(root, script=TRAINING, arguments=arguments, **options)
    try:
        return calm_record(job, PATIENCE_S)
    finally:
        job.close()


@pytest.mark.parametrize("moments", [SOME, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_a_rank_is_lost_at_moments_of_a_step_and_then_its_machine(
    start_machines: StartMachines, tmp_path: Path, moments: tuple[Moment, ...]
) -> None:
    """What was held there comes from the other machine: no step is lost, and no other process."""
    steps = [FIRST + STRIDE * number for number in range(len(moments) + 1)]
    setting = Setting(mesh=(ROWS, COLUMNS), steps=steps[-1] + 2)
    faults, endings = [], []
    for life, (step, moment) in enumerate(zip(steps, moments, strict=False), start=1):
        if "place" in moment:
            endings.append(Ending(VICTIM, step=step, life=life, **moment))
        else:
            given = {"action": FaultAction.KILL, **moment}
            faults.append(ArmedFault(VICTIM, step=step, incarnation=life, **given))
    (tmp_path / "records").mkdir()
    for step in steps[1:]:
        (tmp_path / "records" / f"gate.{step}").touch()
    machines = start_machines(ROWS + 1)
    job = ShardedJob(machines, tmp_path, msgspec.structs.replace(setting, endings=tuple(endings)), faults)
    for over, step in enumerate(steps[1:], start=1):
        job.held_after(over, step)
        if step == steps[-1]:
            machines[1].power_off()
        job.open_gate(step)
    incidents = job.finish((0, ROWS))
    for incident, replaced in zip(incidents, [{VICTIM}] * len(moments) + [{*ROW}], strict=True):
        assert_nobody_harmed(incident, replaced, ranks=WORLD)
    assert_same_numbers(read_record(job.records), undisturbed(tmp_path / "undisturbed", setting), ranks=WORLD)
