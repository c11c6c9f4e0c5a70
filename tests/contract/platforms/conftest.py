"""A controller that orders what a test says: the real connections, and no decisions. And the platforms that obey it."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import psutil
import pytest

from midstep.agent.fork_server import PRELOAD_STORE
from midstep.cli.joining.opening import let_nodes_join
from midstep.controller.actions import Send
from midstep.controller.endpoints.control_requests import Accepted
from midstep.controller.enrolment.hosts_wire import open_wire
from midstep.controller.liveness import Liveness
from midstep.controller.routes import Routes
from midstep.platforms.local import LocalOptions, LocalPlatform
from midstep.policies.schema import HeartbeatPolicy
from midstep.protocol import environment as names
from midstep.protocol.enrolment import EnrolmentRequested
from midstep.protocol.keys import JobKeys
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import Command, DeleteNode, EndJob, Envelope, NodeJoined, NodeLost
from midstep.protocol.token import TOKEN_VARIABLE, new_token, token_text
from midstep.protocol.transport import RouterSocket
from midstep.protocol.types import CONTROLLER, PLATFORM, node_address

from ..kubernetes.kubelet import InKubernetes

JOB = "contract"
LONG_S = 60.0
TURN_S = 0.02
CHEAP = {names.PRELOAD: PRELOAD_STORE}  # nothing is trained here
MOST = 2  # nodes that each platform may make

_Body = TypeVar("_Body", bound=msgspec.Struct)


class OrderingController:
    """Says to a platform what a test wants it to hear, and keeps what it and its agents say."""

    def __init__(self, keys: Path, platform: str = "of the test") -> None:
        self._keys, self._platform = keys, platform
        self.heard: list[Envelope] = []
        self._term, self._routes = 0, Routes()
        self._joined: set[str] = set()  # nodes, to any controller
        self._open("tcp://127.0.0.1:0")

    def _open(self, endpoint: str) -> None:
        self._term += 1
        self._router = RouterSocket(endpoint, curve=JobKeys.load_server(self._keys))
        self.endpoint = self._router.endpoint
        mailbox = Mailbox(job=JOB, address=CONTROLLER, session=time.time_ns(), retry_s=0.1)
        mailbox.term = self._term
        self._wire, self._enroller = open_wire(
            self._router,
            mailbox,
            self._routes,
            liveness=Liveness(HeartbeatPolicy()),
            world_size=8,
            keys=self._keys,
            platform=self._platform,
        )
        self._turning = asyncio.get_running_loop().create_task(self._turn())

    def succeed(self) -> None:
        """Be the next controller, at the same place."""
        self.close()
        self.heard.clear()
        self._open(self.endpoint)

    def close(self) -> None:
        self._turning.cancel()
        self._router.close()

    async def _turn(self) -> None:
        while True:
            now = time.monotonic()
            for arrival in self._wire.receive(now):
                body = arrival.envelope.body
                if isinstance(body, EnrolmentRequested):
                    self._enroller.take(body, arrival, now, lambda _, answer: answer(Accepted("")))
                    continue
                self.heard.append(arrival.envelope)
                if isinstance(body, NodeJoined):
                    self._joined.add(body.node)
                self._wire.acknowledge(arrival)
            self._wire.resend(now)
            self._wire.flush()
            await asyncio.sleep(TURN_S)

    def order(self, body: Command) -> None:
        """Tell the platform to do something."""
        if isinstance(body, DeleteNode):
            self._routes.placement.learn([Send(PLATFORM, body, 1)])
        self._wire.send(PLATFORM, body, 1, time.monotonic())

    def end_job(self) -> None:
        """Tell all that the job is over, agents first, as the machine does."""
        end = EndJob(0, "done")
        for node in self._joined:
            self._wire.send(node_address(node), end, 1, time.monotonic())
        self.order(end)

    def all(self, kind: type[_Body]) -> list[_Body]:
        return [envelope.body for envelope in self.heard if isinstance(envelope.body, kind)]

    def lost(self) -> list[str]:
        """Return the nodes of which the platform, and not their own agents, has said that they are gone."""
        said = [envelope.body for envelope in self.heard if envelope.sender == PLATFORM]
        return [body.node for body in said if isinstance(body, NodeLost)]

    async def until(self, kind: type[_Body], which: Callable[[_Body], bool] = lambda _: True) -> _Body:
        """Wait for the first message of a kind that fits."""
        await eventually(lambda: any(which(body) for body in self.all(kind)), f"a {kind.__name__}")
        return next(body for body in self.all(kind) if which(body))


async def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    give_up_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < give_up_s, f"still waiting for {what}"
        await asyncio.sleep(TURN_S)


class HostedPlatform(Protocol):
    """A platform under test: it makes at most MOST nodes."""

    def start(self, endpoint: str) -> None:
        """Bring it up, for the controller at an endpoint."""

    def agent_of(self, node: str) -> int | None:
        """Return the process id of a node's agent; None: there is none."""

    async def ended(self) -> None:
        """Wait until it is gone, once the job is over."""


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


Scenario = Callable[[OrderingController, HostedPlatform], Awaitable[None]]


IN_KUBERNETES = partial(InKubernetes, job=JOB, most=MOST, environment=CHEAP)


@pytest.fixture(params=[Local, ByEntryPoint, IN_KUBERNETES], ids=["local", "entry-point", "kubernetes"])
def play(request: pytest.FixtureRequest) -> Iterator[Callable[[Scenario], None]]:
    """Run a scenario on a platform that has been brought up."""
    root = Path(tempfile.mkdtemp(prefix="ms-"))
    token = new_token()
    (root / "token").write_text(token_text(token))
    let_nodes_join(root / "keys", token, JOB)
    JobKeys.add(root / "keys", PLATFORM)  # that of `midstep run` has no token
    platform = request.param(root)

    async def run(scenario: Scenario) -> None:
        controller = OrderingController(root / "keys", "" if request.param is Joined else "of the test")
        try:
            platform.start(controller.endpoint)
            await scenario(controller, platform)
        finally:
            controller.close()

    def play_scenario(scenario: Scenario) -> None:
        try:
            asyncio.run(run(scenario))
        except BaseException:
            for log in root.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()}")
            raise

    yield play_scenario
    shutil.rmtree(root)
