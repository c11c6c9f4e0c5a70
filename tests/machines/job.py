"""A job on several machines: the controller on the first, a node on each of the others. How it is started is said here.

The ranks run the training of the chaos tests, whose gates hold it where a test wants it, and which writes down what it
computes.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from midstep.controller.endpoints.control_requests import (
    Accepted,
    InjectRequest,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
    StopJobRequest,
)
from midstep.controller.endpoints.local_sockets import SOCKET_NAME
from midstep.protocol import environment as names
from midstep.protocol.incidents import JobStatus
from midstep.protocol.token import new_token, token_text
from midstep.protocol.transport import DealerSocket, wait
from midstep.protocol.types import ArmedFault

from ..chaos.jobs import TRAINING, Record, read_record
from .machines import Machine, Machines

PORT = 7070
PATIENCE_S = 600.0  # a starved computer takes minutes to import torch
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
        faults: tuple[ArmedFault, ...] = (),
        on: Sequence[int] = (),
        port: int = PORT,
    ) -> None:
        """`faults`: armed in every process that starts. `on`: machines with agents; all but the first by default."""
        on = on or range(1, len(machines))
        self.machines = machines
        self.root = root
        self._port = port
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
            "spare_nodes": len(on) - nodes,
            "environment": {names.FAULTS: msgspec.json.encode(faults).decode()},
        }
        launcher = machines[0].start((sys.executable, str(_CREATE), json.dumps(options)))
        assert launcher.stdout is not None
        said = launcher.stdout.readline().decode()
        assert said.startswith("/"), f"no job was created: {said}{launcher.communicate()[0].decode()}"
        self._run_directory = said.strip()
        self.controller = self.start_controller()
        self.agents = {number: self.start_agent(number) for number in on}

    # --- how it is started ------------------------------------------------------------------------------------------

    def start_controller(self) -> subprocess.Popen[bytes]:
        """Start a controller, as its launcher does, and as it does again when one has ended."""
        where = ["--job-dir", str(self.root / "job"), "--run-dir", self._run_directory]
        return self._midstep(self.machines[0], "controller", *where, "--listen", f"tcp://{self._controller()}")

    def start_agent(self, number: int) -> subprocess.Popen[bytes]:
        """Start the agent of a machine."""
        return self._midstep(
            self.machines[number], "agent", "--controller", self._controller(), "--log-dir", str(self.root)
        )

    def _controller(self) -> str:
        return f"{self.machines[0].address}:{self._port}"

    def _midstep(self, machine: Machine, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "midstep.cli.main", *words, "--token-file", str(self._token)]
        return machine.start(command, environment=_ENVIRONMENT, output=self.root / f"{machine.name}.log")

    # --- watching ---------------------------------------------------------------------------------------------------

    def status(self) -> JobStatus | None:
        """Return the live status; None while no controller answers."""
        reply = self._ask(StatusRequest())
        return reply.status if isinstance(reply, StatusReply) else None

    def answer(self) -> JobStatus:
        """Return the live status, which a controller has to give."""
        return self.until(lambda _: True, "a status")

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
        return self.machine_named(self.answer().ranks[rank].node)

    def machine_named(self, node: str) -> Machine:
        """Return the machine of a node, whose name has a number behind it where the machine joined while it lived."""
        return self.machines[int(node.removeprefix("m").partition("-")[0])]

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
        """Kill the process that holds a rank; wait for one where the last one is being replaced."""
        status = self.until(lambda now: now.ranks[rank].pid > 0, f"a process of rank {rank}")
        self.machine_named(status.ranks[rank].node).run("kill", "-9", str(status.ranks[rank].pid))

    def spare(self) -> Machine:
        """Return a machine that is a spare."""
        status = self.until(lambda now: any(node.state == "spare" for node in now.nodes), "a spare")
        return self.machine_named(next(node.node for node in status.nodes if node.state == "spare"))

    def inject(self, fault: ArmedFault) -> None:
        """Arm a fault in the process that holds a rank now."""
        self.answer()
        reply = self._ask(InjectRequest(fault), PATIENCE_S)
        assert isinstance(reply, Accepted), reply

    def until_stopped(self, machine: Machine) -> int:
        """Wait until a process of a rank has stopped itself on a machine; return its pid on this computer."""
        deadline = time.monotonic() + PATIENCE_S
        while not (stopped := stopped_ranks(machine)):
            assert time.monotonic() < deadline, f"no rank stops itself on {machine.name}:\n{self.said()}"
            time.sleep(_POLL_S)
        return stopped[0]

    def power_on(self, machine: Machine) -> None:
        """Boot a machine that was powered off, and let it join again once it has been given up."""

        self._until_given_up(machine)
        machine.power_on()
        self.agents[machine.number] = self.start_agent(machine.number)

    def join_again(self, machine: Machine) -> None:
        """Start the agent of a machine again, as its launcher does, once the last one has been given up."""
        self._until_given_up(machine)
        self.agents[machine.number] = self.start_agent(machine.number)

    def kill_agent(self, machine: Machine) -> None:
        """Kill the agent of a machine."""
        _kill_program_of(self.agents[machine.number])

    def end_controller(self) -> None:
        """Kill the controller; there is no other one."""
        _kill_program_of(self.controller)
        self.controller.wait(PATIENCE_S)

    def kill_controller(self) -> None:
        """Kill the controller, and start it again, as its launcher does."""
        self.end_controller()
        self.controller = self.start_controller()

    def _until_given_up(self, machine: Machine) -> None:
        def given_up(status: JobStatus) -> bool:
            here = [node for node in status.nodes if self.machine_named(node.node) is machine]
            return all(node.state == "lost" for node in here)

        self.until(given_up, f"{machine.name} to be given up")

    def finish(self) -> dict[str, Any]:
        """Wait for the job, which has to end well, and return what `midstep report --json` says."""
        try:
            code = self.controller.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end: {self.status()}\n{self.said()}") from None
        assert code == 0, self.said()
        return self.report()

    def stop(self) -> dict[str, Any]:
        """Have the job end where it is, and return what `midstep report --json` says."""
        self.answer()
        self._ask(StopJobRequest("enough"), PATIENCE_S)
        self.controller.wait(PATIENCE_S)
        return self.report()

    def report(self) -> dict[str, Any]:
        """Return what `midstep report --json` says."""
        done = subprocess.run(
            [sys.executable, "-m", "midstep.cli.main", "report", "--json", str(self.root / "job")],
            capture_output=True,
            check=True,
            timeout=PATIENCE_S,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        time = report["time"]  # of every job on machines, whatever has happened to it
        assert sum(time["seconds"].values()) == pytest.approx(time["wall_s"], rel=0.01)
        return report

    def said(self) -> str:
        """Return everything that was printed, for messages of failed tests."""
        logs = [*sorted(self.root.glob("*.log")), *sorted(self.root.glob("logs/*"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in logs)

    def _ask(self, request: Request, limit_s: float = STATUS_S) -> Reply | None:
        """Ask the controller through the first machine's files: no process has to be started there."""
        for path in self._sockets():
            reply = answer_at(path, request, limit_s)
            if reply is not None:
                return reply
        return None

    def _sockets(self) -> list[Path]:
        """Return where the controller may be asked, the most likely place first."""
        path = Path(f"/proc/{self.machines[0].space.pid}/root{self._run_directory}/{SOCKET_NAME}")
        return [path] if path.exists() else []


def answer_at(path: Path, request: Request, limit_s: float) -> Reply | None:
    """Ask the controller behind a socket of a machine's files, as this computer sees them; None: it says nothing."""
    dealer = DealerSocket(f"ipc://{path}", identity=f"test-{secrets.token_hex(4)}", curve=None)
    deadline = time.monotonic() + limit_s
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


def _kill_program_of(nsenter: subprocess.Popen[bytes]) -> None:
    """Kill the one program that an `nsenter` has started in a machine, whose end is its own."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        for child in Path(f"/proc/{nsenter.pid}/task/{nsenter.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)


def stopped_ranks(machine: Machine) -> list[int]:
    """Return the processes of ranks on a machine that a signal has stopped, by their pids on this computer."""
    found = []
    here = os.readlink(f"/proc/{machine.space.pid}/ns/pid")
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith("midstep-r") and rest.split()[0] == "T" and os.readlink(directory / "ns/pid") == here:
                found.append(int(directory.name))
    return found
