"""A real agent and the least controller that it can talk to. Whatever a test leaves behind is killed."""

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from midstep.agent.fork_server import PRELOAD_STORE
from midstep.protocol import environment as names
from midstep.protocol.messages import (
    NodeJoined,
    ProcessExited,
    ProcessStarted,
    StartProcess,
    StartProcesses,
    WelcomeNode,
)
from midstep.protocol.types import JobSettings, JobSpec, Rendezvous

from .least_controller import JOB, LONG_S, Controller

# What these tests start does not train: an agent that imports less is up sooner.
CHEAP = {names.PRELOAD: PRELOAD_STORE}
SETTINGS = JobSettings(heartbeat_s=0.1, stop_grace_s=2.0, stall_grace_s=0.3, stall_after_steps=2)


class Site:
    """A controller, a run directory, and agents that are not left behind."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root = root
        self.controller = Controller(root, nodes)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._lives: dict[str, int] = {}

    async def agent(self, node: str = "node0", *options: str) -> NodeJoined:
        """Start an agent and wait until it has joined."""
        theirs, ours = os.pipe()
        with (self.root / f"{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "midstep.cli.agent", "--job", JOB, "--node", node),
                    *("--controller", self.controller.router.endpoint, "--keys", str(self.root / "keys")),
                    *("--run-dir", str(self.root), "--life-fd", str(theirs)),
                    *options,
                ],
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
                env={**os.environ, names.AGENT_SOCKET: self.mark, **CHEAP},
                start_new_session=True,
            )
        os.close(theirs)
        self._lives[node] = ours
        return await self.controller.until(NodeJoined, lambda joined: joined.node == node)

    @property
    def mark(self) -> str:
        return f"test:{self.root}"

    def welcome(self, script: str, node: str = "node0", **changes: Any) -> None:
        self.script(script)
        job = JobSpec(
            job=JOB,
            command=(str(self.root / "script.py"), "one", "two"),
            is_module=False,
            no_python=False,
            environment={},
            working_directory=str(self.root),
            job_directory=str(self.root / "job"),
            world_size=2,
            ranks_per_node=2,
            nodes=1,
            spare_nodes=0,
            max_restarts=3,
            settings=SETTINGS,
        )
        self.controller.order(WelcomeNode(job=msgspec.structs.replace(job, **changes)), node)

    def script(self, text: str) -> None:
        """Have the processes that are started from now on run another script."""
        (self.root / "script.py").write_text(text)

    def start(self, rank: int, incarnation: int = 0, node: str = "node0", **changes: Any) -> None:
        store = self.controller.all(NodeJoined)[0].store
        order = StartProcess(
            rank=rank,
            local_rank=rank,
            group_rank=0,
            incarnation=incarnation,
            generation=incarnation + 1,
            restart_count=incarnation,
            connected=True,
            store=Rendezvous(store.host, store.port, "of this test"),
        )
        self.controller.order(StartProcesses((msgspec.structs.replace(order, **changes),)), node)

    async def started(self, rank: int, incarnation: int = 0) -> ProcessStarted:
        return await self.controller.until(
            ProcessStarted,
            lambda body: (body.process.rank, body.process.incarnation) == (rank, incarnation),
        )

    async def exited(self, rank: int, incarnation: int = 0) -> ProcessExited:
        return await self.controller.until(
            ProcessExited,
            lambda body: (body.process.rank, body.process.incarnation) == (rank, incarnation),
        )

    def log(self, rank: int, incarnation: int = 0) -> str:
        """Return what a rank has printed."""
        path = self.root / "job" / "logs" / f"rank-{rank}.{incarnation}.log"
        return path.read_text() if path.exists() else ""

    async def says(self, rank: int, text: str, incarnation: int = 0) -> None:
        """Wait until a rank has printed something."""
        await eventually(lambda: text in self.log(rank, incarnation), f"{text!r} in the log of rank {rank}")

    async def mentions(self, text: str, node: str = "node0") -> None:
        """Wait until the agent has logged something."""
        log = self.root / f"{node}.log"
        await eventually(lambda: text in log.read_text(), f"{text!r} in {log.name}")

    async def eventually(self, holds: Callable[[], bool], what: str) -> None:
        await eventually(holds, what)

    def processes(self) -> list[psutil.Process]:
        """Everything that was started, directly or not, by this site's agents."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(names.AGENT_SOCKET) == self.mark:
                    found.append(process)
        return found

    def below(self, name: str, node: str = "node0") -> list[psutil.Process]:
        """Find the agent's children by what they are: forksrv, store, idle, r0, r1, ..."""
        children = psutil.Process(self.agents[node].pid).children()
        found = []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == f"midstep-{name}" and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    def let_go(self, node: str = "node0") -> None:
        """Close the life pipe, as the launcher's death does."""
        os.close(self._lives.pop(node))

    async def gone(self, node: str = "node0") -> int:
        """Wait until the agent has ended, and everything that it started; return its status."""
        await eventually(lambda: self.agents[node].poll() is not None, f"the end of {node}")
        await eventually(lambda: not self.processes(), "the end of everything")
        return self.agents[node].returncode

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self.agents.values():
            agent.wait()
        for fd in self._lives.values():
            os.close(fd)
        self.controller.router.close()


async def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        await asyncio.sleep(0.02)


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: unix sockets allow no long ones."""
    path = Path(tempfile.mkdtemp(prefix="ms-"))
    yield path
    shutil.rmtree(path)


Scenario = Callable[[Site], Awaitable[None]]
Turn = Callable[[Site, int], Awaitable[None]]
LIVES = 10  # incarnations of each rank that one turn may use


@pytest.fixture
def play(root: Path) -> Callable[..., None]:
    """Run a scenario against a fresh site, and leave nothing behind."""

    async def run(scenario: Scenario, nodes: int) -> None:
        site = Site(root, nodes)
        try:
            await scenario(site)
        except BaseException:
            tell(root)
            raise
        finally:
            site.close()

    def play_scenario(scenario: Scenario, nodes: int = 1) -> None:
        asyncio.run(run(scenario, nodes))

    return play_scenario


@pytest.fixture(scope="module")
def play_in_turn() -> Iterator[Callable[[Turn], None]]:
    """Run scenarios one after the other on one agent: each is told from which incarnation on the ranks are its own."""
    with taking_turns(LIVES) as play_turn:
        yield play_turn


@contextlib.contextmanager
def taking_turns(apart: int, **changes: Any) -> Iterator[Callable[[Turn], None]]:
    """Yield what runs scenarios one after the other on one agent, each with a number that is greater by `apart`."""
    loop, place = asyncio.new_event_loop(), Path(tempfile.mkdtemp(prefix="ms-"))
    turns = itertools.count(step=apart)

    async def begin() -> Site:
        site = Site(place, nodes=1)
        await site.agent()
        site.welcome("", **changes)
        return site

    def play_turn(scenario: Turn) -> None:
        try:
            loop.run_until_complete(scenario(site, next(turns)))
        except BaseException:
            tell(place)
            raise

    site = loop.run_until_complete(begin())
    try:
        yield play_turn
    finally:
        site.close()
        loop.close()
        shutil.rmtree(place)


def tell(root: Path) -> None:
    """Print all logs of a site, for the message of a failed test."""
    for log in [*root.glob("*.log"), *root.glob("job/logs/*")]:
        print(f"--- {log.name}\n{log.read_text()}")
