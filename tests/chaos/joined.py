"""A job on several machines that are all this one: each is a `midstep run` with directories of its own."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from midstep.controller.endpoints.control_requests import StatusReply, StatusRequest
from midstep.controller.endpoints.local_sockets import NoController, ask
from midstep.protocol.incidents import JobStatus
from midstep.protocol.token import Token, new_token, token_text

from .jobs import MARK, PATIENCE_S, ROOMY, STATUS_S, STEP_S, STEPS, TRAINING, Record, read_record

MIDSTEP = (sys.executable, "-m", "midstep.cli.main")


def write_token(path: Path, token: Token) -> Path:
    """Write a token as a user does."""
    path.write_text(token_text(token) + "\n")
    path.chmod(0o600)
    return path


class JoinedJob:
    """Machines that run the same command. `nodes` of them get ranks; who comes later is a spare."""

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 2,
        ranks_per_node: int = 2,
        host: str = "127.0.0.1",
        leave_s: float = 3600.0,
        policy: dict[str, Any] | None = None,
    ) -> None:
        """`policy`: more of its sections."""
        self.name = f"joined-{secrets.token_hex(4)}"
        self.root, self.records = root, root / "records"
        self.records.mkdir()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as free:
            port = free.getsockname()[1]
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.token = write_token(root / "job.token", new_token())
        whole = {**ROOMY, "checkpoint": {**ROOMY["checkpoint"], "directory": str(root / "checkpoints")}}
        whole["heartbeat"] = {"missed": 10}
        whole["stall"] = {"grace_s": PATIENCE_S, "suspended_s": PATIENCE_S}  # to be held at a gate is no stall
        whole |= {"agent": {"leave_s": leave_s}, **(policy or {})}
        (root / "policy.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(whole))))
        self._shape = ("--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node))
        self.machines: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str, token: Path | None = None, **environment: str) -> int:
        """Start `midstep run` on one more machine; return its number."""
        number = len(self.machines)
        where = ("--rdzv-endpoint", self.endpoint, "--rdzv-id", self.name, "--token-file", str(token or self.token))
        command = (*MIDSTEP, "run", *self._shape, *where, "--policy", str(self.root / "policy.yaml"), *options)
        variables = {"MIDSTEP_HOME": str(self.home(number)), MARK: self.name, **environment}
        with self.output(number).open("wb") as output:
            self.machines.append(
                subprocess.Popen(
                    (*command, str(TRAINING), str(self.records), str(STEPS), str(STEP_S)),
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return number

    def home(self, number: int) -> Path:
        """Return what is ~/.midstep/jobs on a machine."""
        return self.root / f"home{number}"

    def output(self, number: int) -> Path:
        """Return the file with what a machine's `midstep run` has printed."""
        return self.root / f"machine{number}.txt"

    def controller(self) -> int:
        """Return the machine that runs the controller."""
        return next(
            number for number in range(len(self.machines)) if (self.home(number) / self.name / "job.json").exists()
        )

    @property
    def directory(self) -> Path:
        """Return the job directory."""
        return self.home(self.controller()) / self.name

    def run_directory(self) -> Path:
        """Return where the controller's sockets and keys are."""
        return Path(json.loads((self.directory / "job.json").read_text())["run_dir"])

    def status(self) -> JobStatus | None:
        """Return the live status; None while no controller answers."""
        with contextlib.suppress(NoController, FileNotFoundError, StopIteration):
            reply = ask(self.run_directory(), StatusRequest(), STATUS_S)
            return reply.status if isinstance(reply, StatusReply) else None
        return None

    def until(self, holds: Callable[[JobStatus], bool], what: str) -> JobStatus:
        """Wait until the job's live status is as wanted, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = self.status()
            if status is not None and holds(status):
                return status
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{self.said()}"
            time.sleep(0.05)

    def held_at(self, step: int) -> JobStatus:
        """Wait until all ranks stand at the gate of a step, with no incident open."""
        return self.until(
            lambda status: status.phase == "running" and all(rank.step == step for rank in status.ranks),
            f"all ranks at the gate of step {step}",
        )

    def gate(self, step: int) -> Path:
        """Return the file that holds all ranks in front of a step while it is there."""
        return self.records / f"gate.{step}"

    def machine_of(self, rank: int) -> int:
        """Return the machine on which a rank has written its log."""
        found = (n for n in range(len(self.machines)) if list(self.home(n).glob(f"*/logs/rank-{rank}.*.log")))
        return next(found)

    def kill(self, number: int) -> None:
        """End a machine as a power cut does: everything that it runs, at once."""
        launcher = psutil.Process(self.machines[number].pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait(self, number: int) -> int:
        """Wait for the end of a machine's `midstep run`; return its exit code."""
        try:
            return self.machines[number].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"machine {number} did not end:\n{self.said()}") from None

    def record(self) -> Record:
        """Return what the ranks wrote down."""
        return read_record(self.records)

    def report(self) -> dict[str, Any]:
        """Return what `midstep report --json` says."""
        done = subprocess.run(
            (*MIDSTEP, "report", "--json", str(self.directory)), capture_output=True, check=True, timeout=PATIENCE_S
        )
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def said(self) -> str:
        """Return everything that was printed, for messages of failed tests."""
        logs = sorted({*self.root.glob("machine*.txt"), *self.root.glob("home*/*/logs/*")})
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-4000:]}" for log in logs if log.is_file())

    def left(self) -> list[psutil.Process]:
        """Return every process of the job, wherever it has got to."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.name:
                    found.append(process)
        return found

    def close(self) -> None:
        """Kill whatever is there."""
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for machine in self.machines:
            machine.wait(10)
