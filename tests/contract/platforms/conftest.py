"""The platforms that the scenarios of `scenarios.py` are played on; `tests/ray/test_contract.py` has one more."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from midstep.platforms.local import LocalOptions, LocalPlatform
from midstep.protocol.token import TOKEN_VARIABLE

from ..kubernetes.kubelet import InKubernetes
from .ordering import CHEAP, JOB, MOST, OF_TEST, Play, eventually, hosting


class Local:
    """The platform of `midstep run`, in its launcher's process."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def start(self, endpoint: str) -> None:
        root = str(self._root)
        options = LocalOptions(JOB, endpoint, f"{root}/keys", root, root, max_nodes=MOST, grace_s=10.0)
        self._platform = LocalPlatform(options, environment={**os.environ, **CHEAP})
        self._platform.start(0)

    def agent_of(self, node: str) -> int | None:
        return self._platform.agents.get(node)

    async def ended(self) -> None:
        await self._platform.close()


class ByEntryPoint:
    """The example of docs/platforms.md, hosted by `midstep platform`, which finds it in another package."""

    def __init__(self, root: Path) -> None:
        self._root = root
        metadata = root / "other_package-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
        entry = "agents-here = midstep.examples.agents_here:AgentsHere"
        (metadata / "entry_points.txt").write_text(f"[midstep.platforms]\n{entry}\n")

    def start(self, endpoint: str) -> None:
        token = (self._root / "token").read_text()
        command = ["platform", "agents-here", "--job", JOB, "--controller", endpoint, "-o", f"most={MOST}"]
        environment = {**os.environ, **CHEAP, "PYTHONPATH": str(self._root), TOKEN_VARIABLE: token}
        with (self._root / "platform.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "midstep.cli.main", *command], stdout=log, stderr=log, env=environment
            )

    def agent_of(self, node: str) -> int | None:
        return next((pid for pid, arguments in _children(self._process.pid) if node in arguments), None)

    async def ended(self) -> None:
        await eventually(lambda: self._process.poll() is not None, "the end of the platform's process")
        assert self._process.returncode == 0


class Joined:
    """No platform: agents that a user has started, on what are to be two machines."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, endpoint: str) -> None:
        environment = {**os.environ, **CHEAP, TOKEN_VARIABLE: (self._root / "token").read_text()}
        for node in ("m0", "m1"):
            arguments = ["--job", JOB, "--controller", endpoint, "--node", node, "--log-dir", str(self._root / node)]
            self._agents[node] = subprocess.Popen(
                [sys.executable, "-m", "midstep.cli.agent", *arguments], env=environment, start_new_session=True
            )

    def agent_of(self, node: str) -> int | None:
        return self._agents[node].pid

    async def exit_code(self, node: str) -> int:
        """Wait for the end of an agent."""
        await eventually(lambda: self._agents[node].poll() is not None, f"the end of {node}")
        return self._agents[node].returncode

    async def ended(self) -> None:
        """There is nothing to end."""


def _children(pid: int) -> list[tuple[int, list[str]]]:
    return [
        (child.pid, child.cmdline())
        for child in psutil.Process(pid).children()
        if child.status() != psutil.STATUS_ZOMBIE
    ]


IN_KUBERNETES = partial(InKubernetes, job=JOB, most=MOST, environment=CHEAP)


@pytest.fixture(params=[Local, ByEntryPoint, IN_KUBERNETES], ids=["local", "entry-point", "kubernetes"])
def play(request: pytest.FixtureRequest) -> Iterator[Play]:
    """Run a scenario on a platform that has been brought up."""
    with hosting(request.param, "" if request.param is Joined else OF_TEST) as play_scenario:
        yield play_scenario
