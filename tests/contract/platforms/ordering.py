"""A controller that orders what a test says: the real connections, and no decisions. And how a scenario is played."""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from midstep.agent.fork_server import PRELOAD_STORE
from midstep.controller.endpoints.control_requests import Accepted
from midstep.controller.enroller import open_wire
from midstep.controller.liveness import Liveness
from midstep.controller.recovery.events import Send
from midstep.controller.routes import Routes
from midstep.launch.job import let_nodes_join
from midstep.policies.schema import HeartbeatPolicy
from midstep.protocol import environment as names
from midstep.protocol.keys import JobKeys
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import Command, DeleteNode, EndJob, EnrolmentRequested, Envelope, NodeJoined, NodeLost
from midstep.protocol.token import new_token, token_text
from midstep.protocol.transport import RouterSocket
from midstep.protocol.types import CONTROLLER, PLATFORM, node_address

JOB = f"contract-{os.getpid()}"  # another checkout may run the same tests here, and run directories bear the name
LONG_S = 60.0
TURN_S = 0.02
CHEAP = {names.PRELOAD: PRELOAD_STORE}  # nothing is trained here
MOST = 2  # nodes that each platform may make
OF_TEST = "of the test"

_Body = TypeVar("_Body", bound=msgspec.Struct)


class OrderingController:
    """Says to a platform what a test wants it to hear, and keeps what it and its agents say."""

    def __init__(self, keys: Path, platform: str = OF_TEST) -> None:
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
        try:
            await eventually(lambda: any(which(body) for body in self.all(kind)), f"a {kind.__name__}")
        except AssertionError as error:  # a node that was lost meanwhile says why
            raise AssertionError(f"{error}; heard {[envelope.body for envelope in self.heard]}") from None
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


Scenario = Callable[[OrderingController, HostedPlatform], Awaitable[None]]
Play = Callable[[Scenario], None]


@contextmanager
def hosting(make: Callable[[Path], HostedPlatform], platform: str = OF_TEST) -> Iterator[Play]:
    """Yield what runs a scenario on a platform that has been brought up. `platform`: as the controller knows it."""
    root = Path(tempfile.mkdtemp(prefix="ms-"))
    token = new_token()
    (root / "token").write_text(token_text(token))
    let_nodes_join(root / "keys", token, JOB)
    JobKeys.add(root / "keys", PLATFORM)  # that of `midstep run` has no token
    hosted = make(root)

    async def run(scenario: Scenario) -> None:
        controller = OrderingController(root / "keys", platform)
        try:
            hosted.start(controller.endpoint)
            await scenario(controller, hosted)
        finally:
            controller.close()

    def play(scenario: Scenario) -> None:
        try:
            asyncio.run(run(scenario))
        except BaseException:
            for log in (*root.glob("*.log"), *root.glob("logs/*.log")):
                print(f"--- {log.name}\n{log.read_text()}")
            raise

    yield play
    shutil.rmtree(root)
