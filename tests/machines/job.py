"""A job on several machines: the controller on the first, a node on each of the others. How it is started is said here.

The ranks run the training of the chaos tests, whose gates hold it where a test wants it, and which writes down what it
computes.
"""

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from midstep.controller.endpoints.control_requests import Reply, Request, StatusReply, StatusRequest
from midstep.controller.endpoints.control_socket import SOCKET_NAME
from midstep.protocol.incidents import JobStatus
from midstep.protocol.token import new_token, token_text
from midstep.protocol.transport import DealerSocket, wait

from ..chaos.jobs import TRAINING, Record, read_record
from .machines import Machine, Machines

PORT = 7070
PATIENCE_S = 120.0
STATUS_S = 2.0
_CREATE = Path(__file__).with_name("create.py")
_POLL_S = 0.05
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Job:
    """A job whose controller is on machine 0, and whose nodes are the others: `nodes` of them, the rest spare."""

    def __init__(
        self,
        machines: Machines,
        root: Path,
        *,
        nodes: int = 2,
        ranks_per_node: int = 1,
        steps: int = 60,
        step_s: float = 0.03,
        policy: dict[str, Any] | None = None,
        gates: tuple[int, ...] = (),
    ) -> None:
        self.machines = machines
        self.root = root
        self.name = f"machines-{secrets.token_hex(4)}"
        self.ranks = nodes * ranks_per_node
        self.records = root / "records"
        self.records.mkdir()
        for step in gates:
            self.gate(step).touch()
        (root / "policy.yaml").write_text(yaml.safe_dump({"checkpoint": {"every_steps": 10}, **(policy or {})}))
        self._token = root / "token"
        self._token.touch(0o600)
        self._token.write_text(token_text(new_token(job=self.name)))
        options = {
            "shared": str(root),
            "job": self.name,
            "command": [str(TRAINING), str(self.records), str(steps), str(step_s)],
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "spare_nodes": len(machines) - 1 - nodes,
        }
        self._run_directory = machines[0].run(sys.executable, str(_CREATE), json.dumps(options)).strip()
        self.controller = self._start_controller()
        self.agents = {number: self.start_agent(number) for number in range(1, len(machines))}

    # --- how it is started ------------------------------------------------------------------------------------------

    def _start_controller(self) -> subprocess.Popen[bytes]:
        where = ["--job-dir", str(self.root / "job"), "--run-dir", self._run_directory]
        return self._midstep(self.machines[0], "controller", *where, "--listen", f"tcp://{self._controller()}")

    def start_agent(self, number: int) -> subprocess.Popen[bytes]:
        """Start the agent of a machine."""
        return self._midstep(
            self.machines[number], "agent", "--controller", self._controller(), "--log-dir", str(self.root)
        )

    def _controller(self) -> str:
        return f"{self.machines[0].address}:{PORT}"

    def _midstep(self, machine: Machine, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "midstep.cli.main", *words, "--token-file", str(self._token)]
        return machine.start(command, environment=_ENVIRONMENT, output=self.root / f"{machine.name}.log")

    # --- watching ---------------------------------------------------------------------------------------------------

    def status(self) -> JobStatus | None:
        """Return the live status; None while no controller answers."""
        reply = self._ask(StatusRequest())
        return reply.status if isinstance(reply, StatusReply) else None

    def until(self, holds: Callable[[JobStatus], bool], what: str, limit_s: float = PATIENCE_S) -> JobStatus:
        """Wait until the job's live status is as wanted, and return it."""
        deadline = time.monotonic() + limit_s
        while True:
            status = self.status()
            if status is not None and holds(status):
                return status
            assert self.controller.poll() is None, f"the job ended while waiting for {what}:\n{self.said()}"
            assert time.monotonic() < deadline, f"still waiting for {what}: {status}\n{self.said()}"
            time.sleep(_POLL_S)

    def held_at(self, step: int) -> JobStatus:
        """Wait until all ranks stand at the gate of a step, with no incident open."""

        def held(status: JobStatus) -> bool:
            return status.phase == "running" and all(rank.step == step for rank in status.ranks)

        return self.until(held, f"all ranks at the gate of step {step}")

    def gate(self, step: int) -> Path:
        """Return the file that holds the ranks in front of a step."""
        return self.records / f"gate.{step}"

    def open_gate(self, step: int) -> None:
        """Let the ranks go on into a step."""
        self.gate(step).unlink()

    def steps_done(self) -> int:
        """Return how many steps every rank has written down; asks no controller."""
        steps = self.record().steps
        return min((len(steps.get(rank, {})) for rank in range(self.ranks)), default=0)

    def until_steps(self, count: int) -> None:
        """Wait until every rank has done so many steps; asks no controller."""
        deadline = time.monotonic() + PATIENCE_S
        while self.steps_done() < count:
            assert time.monotonic() < deadline, f"still waiting for step {count}:\n{self.said()}"
            time.sleep(_POLL_S)

    def record(self) -> Record:
        """Return what the ranks wrote down."""
        return read_record(self.records)

    def machine_of(self, rank: int) -> Machine:
        """Return the machine on which a rank runs."""
        status = self.status()
        assert status is not None
        machines = (self.machines[number] for number in range(len(self.machines)))
        return next(machine for machine in machines if machine.name == status.ranks[rank].node)

    def until_spare(self, node: str) -> None:
        """Wait until a node is a spare."""

        def spare(status: JobStatus) -> bool:
            return any((each.node, each.state) == (node, "spare") for each in status.nodes)

        self.until(spare, f"{node} to be a spare")

    def until_without_ranks(self, machine: Machine) -> None:
        """Wait until no process of a rank is left on a machine; asks no controller."""
        deadline = time.monotonic() + PATIENCE_S
        while "midstep-r" in machine.run("ps", "-A", "-o", "comm="):
            assert time.monotonic() < deadline, f"ranks are still on {machine.name}:\n{self.said()}"
            time.sleep(_POLL_S)

    def kill_rank(self, rank: int) -> None:
        """Kill the process that holds a rank."""
        status = self.status()
        assert status is not None
        self.machine_of(rank).run("kill", "-9", str(status.ranks[rank].pid))

    def finish(self) -> dict[str, Any]:
        """Wait for the job, which has to end well, and return what `midstep report --json` says."""
        try:
            code = self.controller.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end: {self.status()}\n{self.said()}") from None
        assert code == 0, self.said()
        done = subprocess.run(
            [sys.executable, "-m", "midstep.cli.main", "report", "--json", str(self.root / "job")],
            capture_output=True,
            check=True,
            timeout=PATIENCE_S,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def said(self) -> str:
        """Return everything that was printed, for messages of failed tests."""
        logs = [*sorted(self.root.glob("*.log")), *sorted(self.root.glob("logs/*"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in logs)

    def _ask(self, request: Request) -> Reply | None:
        """Ask the controller through the first machine's files: no process has to be started there."""
        path = f"/proc/{self.machines[0].space.pid}/root{self._run_directory}/{SOCKET_NAME}"
        if not Path(path).exists():
            return None
        dealer = DealerSocket(f"ipc://{path}", identity=f"test-{secrets.token_hex(4)}", curve=None)
        deadline = time.monotonic() + STATUS_S
        try:
            dealer.send(msgspec.msgpack.encode(request))
            while (left_s := deadline - time.monotonic()) > 0:
                wait([dealer], (), left_s)
                for received in dealer.receive():
                    reply: Reply = msgspec.msgpack.decode(received.data, type=Reply)
                    return reply
        finally:
            dealer.close()
        return None
