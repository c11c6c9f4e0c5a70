"""The controller: killed, moved, hung, kept from starting."""

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.protocol.messages import IntroduceNode, NodeHeartbeat, NodeJoined

from ..chaos.agent.conftest import Site
from .attack import attack

ENDPOINT_FILE = "controller.endpoint"
SLEEPER = "import time\nprint('sleeping', flush=True)\ntime.sleep(600)\n"


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    """Hold a port, as a program does that got it when the controller was gone."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: unix sockets allow no long ones."""
    path = Path(tempfile.mkdtemp(prefix="ms-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.chaos
@attack(
    "another program takes the port of a controller that died; its successor listens elsewhere",
    holds="every agent finds the successor, and its ranks keep their processes",
    reads="`the controller listens at ... now` in the agent's log",
)
def test_an_agent_finds_a_controller_that_had_to_move(root: Path) -> None:
    """The agent joins at the new place with the process that it had, and goes on beating there."""

    async def scenario(site: Site) -> None:
        await site.agent()
        site.welcome(SLEEPER)
        site.start(0)
        before = await site.started(0)
        controller = site.controller
        port = int(controller.router.endpoint.rpartition(":")[2])
        controller.router.close()
        with taken(port):
            controller.heard.clear()
            controller.term += 1
            controller._open("tcp://127.0.0.1:0")
            (root / ENDPOINT_FILE).write_text(f"{controller.router.endpoint}\n")
            await controller.until(NodeHeartbeat)
            controller.order(IntroduceNode())
            joined = await controller.until(NodeJoined)
            assert joined.processes == (before.process,)

    async def run() -> None:
        site = Site(root, 1)
        try:
            await scenario(site)
        finally:
            site.close()

    asyncio.run(run())
