"""A real controller that stands by in etcd, beside one that leads: who knows the one finds the other."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.controller.election.presence import controllers_in_etcd
from midstep.controller.etcd.place import EtcdPlace
from midstep.controller.journal.etcd_store import submit
from midstep.policies.schema import default_policy, job_settings
from midstep.protocol.incidents import ControllerPhase
from midstep.protocol.token import new_token, token_text
from midstep.protocol.types import JobSpec

from .server import free_ports

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]

PATIENCE_S = 60.0
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
            place, JobSpec(place.job, ("t.py",), False, False, {}, "/", "/", 1, 1, 1, 0, 0, settings), default_policy()
        )

    def start(self, name: str, port: int) -> None:
        where = ["--store", str(self.place).rpartition("/")[0], "--job", self.place.job, "--standby", "--name", name]
        here = ["--job-dir", str(self._directory / name), "--listen", f"tcp://127.0.0.1:{port}"]
        words = [*MIDSTEP, "controller", *where, *here, "--token-file", str(self._token)]
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(words, env=self._environment, stdout=log, stderr=log)

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

    told = controllers.ask(second, "status")
    assert told.returncode == 0, told.stderr
    assert re.search(r"controllers: a \(pid \d+\) hot, term 1, b \(pid \d+\) cold", told.stdout), told.stdout

    controllers.kill("a")
    controllers.until("b", ControllerPhase.HOT)
    told = controllers.ask(second, "status")
    assert "term 2" in told.stdout, told.stdout + told.stderr
