"""A job in etcd: its members and the job's controllers are on the first three machines, the nodes on the others."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from midstep.protocol import environment as names
from midstep.protocol.token import new_token, token_text
from midstep.protocol.types import ArmedFault

from ..chaos.jobs import TRAINING, Record, read_record
from ..etcd.server import CONTROL, PROGRAM
from .machines import Machine, Machines, cables_are_bad

CONTROLLERS = 3
PATIENCE_S = 480.0 if cables_are_bad() else 120.0
_CLIENT, _PEER, _CONTROLLER = 2379, 2380, 7070
_POLL_S = 0.05
_WRONG_CLOCK = Path(__file__).with_name("wrong_clock")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# Without them members that are 50 ms apart, and lose frames, take each other for dead.
_FAR_APART = ("--heartbeat-interval", "300", "--election-timeout", "3000")
_KILL = "import psutil, sys; [each.kill() for each in psutil.process_iter() if each.name() == sys.argv[1]]"
_MIDSTEP = (sys.executable, "-m", "midstep.cli.main")


class EtcdJob:
    """Two ranks, a node each; machines beyond those are spares."""

    def __init__(
        self,
        machines: Machines,
        root: Path,
        *,
        steps: int,
        policy: str,
        wall_clocks: Sequence[float] = (),
        token: Path | None = None,
        without_agent: Sequence[int] = (),
        faults: Sequence[ArmedFault] = (),
        step_s: float = 0.02,
    ) -> None:
        """`wall_clocks`: what those of the controllers' machines are off by, in seconds. `token`: a file with one.

        `faults`: armed in every process that starts.
        """
        self.machines = machines
        self.root = root
        self.records = root / "records"
        self.records.mkdir(exist_ok=True)
        self._token = token or _write_token(root / "token")
        (root / "policy.yaml").write_text(policy)
        self._wall_clocks: dict[int, Path] = {}
        self._store = f"etcd://{','.join(f'{machines[number].address}:{_CLIENT}' for number in range(CONTROLLERS))}"
        for number, offset_s in enumerate(wall_clocks):
            self._wall_clocks[number] = root / f"wall-clock.m{number}"
            self.set_wall_clock(number, offset_s)
        for number in range(CONTROLLERS):
            self.start_member(number)
        self._submit(steps, step_s, faults)
        self.controllers = {number: self.start_controller(number) for number in range(CONTROLLERS)}
        nodes = [number for number in range(CONTROLLERS, len(machines)) if number not in without_agent]
        self.agents = {number: self.start_agent(number) for number in nodes}

    # --- how it is started ------------------------------------------------------------------------------------------

    def start_member(self, number: int) -> None:
        """Start the member of etcd on a machine, with what it knew before."""
        client, peer = (f"http://{self.machines[number].address}:{port}" for port in (_CLIENT, _PEER))
        cluster = ",".join(f"m{each}=http://{self.machines[each].address}:{_PEER}" for each in range(CONTROLLERS))
        self.machines[number].start(
            [
                PROGRAM,
                *("--name", f"m{number}", "--data-dir", str(self.root / f"etcd.m{number}")),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", cluster),
                *(_FAR_APART if cables_are_bad() else ()),
            ],
            output=self.root / f"etcd{number}.log",
        )

    def boot(self, number: int) -> None:
        """Boot a controller's machine that was powered off; wait until its member of etcd knows what others know."""
        machine = self.machines[number]
        machine.power_on()
        self.start_member(number)
        health = (CONTROL, f"--endpoints=http://{machine.address}:{_CLIENT}", "endpoint", "health")
        self.until(lambda: "is healthy" in machine.run("sh", "-c", f"{shlex.join(health)} 2>&1", check=False), "etcd")
        self.controllers[number] = self.start_controller(number)

    def end_members(self) -> None:
        """Kill all members of etcd; what they have acknowledged is on their disks."""
        for number in range(CONTROLLERS):
            self.machines[number].run(sys.executable, "-c", _KILL, Path(PROGRAM).name)

    def _submit(self, steps: int, step_s: float, faults: Sequence[ArmedFault]) -> None:
        words = (
            *("submit", "--store", self._store, "--job", "demo", "--job-dir", str(self.root / "job"), "--nnodes", "2"),
            *("--env", f"{names.FAULTS}={msgspec.json.encode(faults).decode()}"),
        )
        training = (str(TRAINING), str(self.records), str(steps), str(step_s))
        deadline = time.monotonic() + PATIENCE_S
        while True:  # a new cluster of etcd has to find its leader first
            said = self.machines[0].run(
                *_MIDSTEP, *words, "--policy", str(self.root / "policy.yaml"), *training, check=False
            )
            if "submitted" in said:
                return
            assert time.monotonic() < deadline, said

    def start_controller(self, number: int) -> subprocess.Popen[bytes]:
        """Start a controller that stands by."""
        machine = self.machines[number]
        where = ("--store", self._store, "--job-dir", str(self.root / f"c{number}"), "--name", machine.name)
        listen = ("--listen", f"tcp://{machine.address}:{_CONTROLLER}", "--standby")
        clock = self._wall_clocks.get(number)
        wrong = {} if clock is None else {"PYTHONPATH": str(_WRONG_CLOCK), "MIDSTEP_TEST_WALL_CLOCK": str(clock)}
        return self._midstep(machine, "controller", *where, *listen, environment=wrong)

    def set_wall_clock(self, number: int, offset_s: float) -> None:
        """Put the wall clock of a controller's machine wrong, also while that runs."""
        written = self.root / "wall-clock.next"
        written.write_text(str(offset_s))
        written.replace(self._wall_clocks[number])

    def start_agent(self, number: int, token: Path | None = None) -> subprocess.Popen[bytes]:
        """Start the agent of a machine, with the job's token or another one."""
        words = ("agent", "--controller", self._endpoints, "--log-dir", str(self.root))
        return self._midstep(self.machines[number], *words, token=token)

    @property
    def _endpoints(self) -> str:
        return ",".join(f"{self.machines[each].address}:{_CONTROLLER}" for each in range(CONTROLLERS))

    def kill_controller(self, number: int) -> None:
        """Kill the controller of a machine."""
        self.machines[number].run("pkill", "-9", "-f", "midstep.cli.main controller")
        self.controllers[number].wait(PATIENCE_S)

    def _midstep(
        self, machine: Machine, *words: str, token: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        command = [*_MIDSTEP, *words, "--token-file", str(token or self._token)]
        return machine.start(command, environment={**_ENVIRONMENT, **(environment or {})}, output=self._log(machine))

    def _log(self, machine: Machine) -> Path:
        return self.root / f"{machine.name}.log"

    # --- watching ---------------------------------------------------------------------------------------------------

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for something that has to happen."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{self.said()}"
            time.sleep(_POLL_S)

    def leader(self, term: int) -> int:
        """Wait until a term has begun, and return the machine of its controller."""
        found: list[int] = []

        def led() -> bool:
            found[:] = [number for number in range(CONTROLLERS) if f"term {term} begins" in self.text(number)]
            return bool(found)

        self.until(led, f"term {term}")
        return found[0]

    def until_steps(self, count: int) -> None:
        """Wait until each rank has written down so many steps."""
        self.until(lambda: self.steps_done() >= count, f"step {count}")

    def steps_done(self) -> int:
        """Return how many steps every rank has written down."""
        steps = self.record().steps
        return min((len(steps.get(rank, {})) for rank in range(2)), default=0)

    def record(self) -> Record:
        """Return what the ranks wrote down."""
        return read_record(self.records)

    def status(self, number: int) -> dict[str, Any]:
        """Return what `midstep status` says on the machine of a controller."""
        said = self.machines[number].run(*_MIDSTEP, "status", "--json", str(self.root / f"c{number}"))
        answer: dict[str, Any] = json.loads(said)
        return answer

    def kill_rank(self, rank: int, status: dict[str, Any]) -> None:
        """Kill the process that holds a rank."""
        known = status["ranks"][rank]
        assert known["pid"], f"rank {rank} is being replaced: {status}"
        machine = next(self.machines[number] for number in self.agents if f"m{number}" == known["node"])
        machine.run("kill", "-9", str(known["pid"]))

    def until_all_stand_by(self, leader: int) -> None:
        """Wait until the one that leads knows of all controllers: they start at once, and not at the same pace."""
        self.until(lambda: len(self.status(leader)["controllers"]) == CONTROLLERS, "all controllers")

    def promote(self, number: int) -> str:
        """Let the controller of a machine lead, as an admin on a machine without one; return what that says."""
        elsewhere = self.machines[CONTROLLERS]
        token = self.root / "admin.token"
        token.touch(0o600)
        token.write_text(elsewhere.run(*_MIDSTEP, "token", "--role", "admin", "--token-file", str(self._token)))
        where = ("--controller", self._endpoints, "--token-file", str(token))
        return elsewhere.run(*_MIDSTEP, "promote", self.machines[number].name, *where)

    def report(self, number: int) -> dict[str, Any]:
        """Return what `midstep report` says on a machine, when the job is over."""
        said = self.machines[number].run(*_MIDSTEP, "report", "--json", str(self.root / f"c{number}"))
        answer: dict[str, Any] = json.loads(said)
        return answer

    def until_over(self) -> None:
        """Wait until the agents have ended with the job's exit code."""
        for number, agent in self.agents.items():
            try:
                code = agent.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the job does not end:\n{self.said()}") from None
            assert code == 0, f"m{number}: {code}\n{self.said()}"

    def said(self) -> str:
        """Return everything that midstep printed, for messages of failed tests."""
        logs = [*sorted(self.root.glob("m?.log")), *sorted(self.root.glob("logs/*"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-5000:]}" for log in logs)

    def text(self, number: int) -> str:
        """Return what midstep has printed on a machine."""
        path = self._log(self.machines[number])
        return path.read_text(errors="replace") if path.exists() else ""


def _write_token(file: Path) -> Path:
    file.touch(0o600)
    file.write_text(token_text(new_token(job="demo")))
    return file
