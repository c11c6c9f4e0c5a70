"""A real controller that stands by in etcd, beside one that leads: who knows the one finds the other."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from midstep.controller.election.presence import controllers_in_etcd
from midstep.controller.etcd.place import EtcdPlace
from midstep.controller.journal.etcd_store import submit
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.incidents import ControllerPhase
from midstep.protocol.token import new_token, token_text
from midstep.protocol.types import JobSpec

from .server import free_ports

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]

PATIENCE_S = 60.0
CONNECTED_S = 2.0
TOLD_S = 4.0  # a look at the controllers, a heartbeat, and what a busy machine takes
MIDSTEP = [sys.executable, "-m", "midstep.cli.main"]


class Controllers:
    """Controllers of one job, and the commands of an operator elsewhere."""

    def __init__(self, place: EtcdPlace, directory: Path) -> None:
        self.place = place
        self._directory = directory
        self._token = directory / "job.token"
        self._token.touch(0o600)
        self._token.write_text(token_text(new_token()))
        self._environment = {**os.environ, "MIDSTEP_HOME": str(directory / "home")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        settings = job_settings(default_policy(), "/")
        submit(
            place, JobSpec(place.job, ("t.py",), False, False, {}, "/", "/", 2, 1, 2, 0, 0, settings), default_policy()
        )

    def start(self, name: str, port: int) -> None:
        where = ["--store", str(self.place).rpartition("/")[0], "--job", self.place.job, "--standby", "--name", name]
        here = ["--job-dir", str(self._directory / name), "--listen", f"tcp://127.0.0.1:{port}"]
        words = [*MIDSTEP, "controller", *where, *here, "--token-file", str(self._token)]
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(words, env=self._environment, stdout=log, stderr=log)

    def start_agent(self, port: int) -> None:
        """Start an agent that was given one endpoint."""
        where = ["--job", self.place.job, "--controller", f"127.0.0.1:{port}", "--token-file", str(self._token)]
        with (self._directory / "agent.log").open("wb") as log:
            words = [*MIDSTEP, "agent", *where, "--node", "m"]
            self._processes["agent"] = subprocess.Popen(words, env=self._environment, stdout=log, stderr=log)

    def until_connected(self, port: int) -> None:
        """Wait until the agent has stayed connected with a port for longer than a handshake that is refused."""
        agent, since_s, give_up = psutil.Process(self._processes["agent"].pid), None, time.monotonic() + PATIENCE_S
        while since_s is None or time.monotonic() - since_s < CONNECTED_S:
            assert time.monotonic() < give_up, (self._directory / "agent.log").read_text()
            there = {each.raddr.port for each in agent.net_connections("tcp") if each.status == "ESTABLISHED"}
            since_s = (since_s or time.monotonic()) if port in there else None
            time.sleep(0.1)

    def until_listed(self, port: int, *what: str) -> None:
        """Wait until the status at an endpoint has all this."""
        give_up = time.monotonic() + PATIENCE_S
        while not all(each in (told := self.ask(port, "status").stdout) for each in what):
            assert time.monotonic() < give_up, told + (self._directory / "agent.log").read_text()

    def until(self, name: str, phase: ControllerPhase) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while phase not in {each.phase for each in controllers_in_etcd(self.place) if each.name == name}:
            assert time.monotonic() < give_up
            time.sleep(0.1)

    def ask(self, port: int, *words: str) -> subprocess.CompletedProcess[str]:
        where = ["--controller", f"127.0.0.1:{port}", "--token-file", str(self._token)]
        command = [*MIDSTEP, *words, self.place.job, *where]
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes.pop(name).wait()

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)


@pytest.fixture
def controllers(place: EtcdPlace, tmp_path: Path) -> Iterator[Controllers]:
    made = Controllers(place, tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_an_operator_is_served_at_the_endpoint_of_one_that_stands_by(controllers: Controllers) -> None:
    """Also by that one itself, once it leads: the socket at which it stood by is the one that it serves at."""
    first, second = free_ports(2)
    controllers.start("a", first)
    controllers.until("a", ControllerPhase.HOT)
    controllers.start("b", second)
    controllers.until("b", ControllerPhase.COLD)

    controllers.until_listed(second, "controllers: a (pid ", ") hot, term 1, b (pid ", ") cold")  # it looks each second

    controllers.kill("a")
    controllers.until("b", ControllerPhase.HOT)
    told = controllers.ask(second, "status")
    assert "term 2" in told.stdout, told.stdout + told.stderr


def test_an_agent_finds_a_controller_that_was_started_after_it_at_an_address_that_it_was_not_given(
    controllers: Controllers,
) -> None:
    """The one that it was given told it of the other, and is gone."""
    first, second = free_ports(2)
    controllers.start("a", first)
    controllers.until("a", ControllerPhase.HOT)
    controllers.start_agent(first)
    controllers.until_listed(first, "term 1", "m     ")
    controllers.start("b", second)
    controllers.until("b", ControllerPhase.COLD)
    time.sleep(TOLD_S)

    controllers.kill("a")
    controllers.until("b", ControllerPhase.HOT)
    controllers.until_connected(second)
