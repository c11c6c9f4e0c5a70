"""Parts of a node that stand still

A process that is stopped (SIGSTOP, a debugger) or hangs has not ended, and keeps its place.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from midstep.agent.fork_server_host import Watchdog
from midstep.platforms.processes import WatchedProcess
from midstep.protocol.messages import NodeHeartbeat, StoreMoved

from ..chaos.agent.conftest import play, root  # noqa: F401 - fixtures
from .attack import attack

Play = Callable[..., None]

STORE = """
import os, torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set("mark", "here")
print("served", flush=True)
"""


@pytest.mark.chaos
@attack(
    "the store's process of a node, its fork server and its idle process are stopped with SIGSTOP",
    holds="the agent kills and replaces them; the store serves the same port, the controller hears of it, ranks start",
    reads="in the agent's log: which process is stopped, killed and replaced",
)
def test_stopped_processes_of_an_agent_are_replaced(play: Play) -> None:  # noqa: F811
    """An idle process is asked for a sign of life before it gets its order, the others all the time."""

    async def scenario(site: Any) -> None:
        joined = await site.agent()
        site.welcome(STORE)
        await site.eventually(lambda: bool(site.below("idle")), "an idle process")
        beats = len(site.controller.all(NodeHeartbeat))
        await site.eventually(lambda: len(site.controller.all(NodeHeartbeat)) > beats + 3, "it to be kept")

        def parts() -> dict[int, Any]:
            return {each.pid: each for name in ("idle", "forksrv", "store") for each in site.below(name)}

        # The first idle process may become the store; then another one is forked, which takes its time.
        await site.eventually(lambda: len(parts()) == 3, "an idle process, the fork server and the store at once")
        stopped = parts()
        for each in stopped.values():
            each.suspend()

        moved = await site.controller.until(StoreMoved)
        assert moved.store == joined.store
        site.start(0)
        assert (await site.started(0)).process.pid not in stopped
        assert (await site.exited(0)).status == 0
        assert "served" in site.log(0)
        await site.eventually(lambda: bool(site.below("forksrv")), "another fork server")
        await site.eventually(lambda: not any(each.is_running() for each in stopped.values()), "the end of all three")
        log = (site.root / "node0.log").read_text()
        assert log.count("is stopped; it is killed and replaced") == 2

    play(scenario)


class Quick(Watchdog):
    """A watchdog with little patience."""

    def __init__(self, process: WatchedProcess, ping: Callable[[], None]) -> None:
        super().__init__("the part", process, ping, answer_s=0.2, check_s=0.05)


def watched(answers: bool, *, stop: bool = False, seconds: float = 20.0) -> int | None:
    """Watch a process that does nothing; return with which status it has ended, None if it has not."""

    async def scenario() -> int | None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        process = WatchedProcess(child.pid, lambda _: None)
        try:
            if stop:
                os.kill(child.pid, signal.SIGSTOP)
            watchdog = Quick(process, lambda: watchdog.answered() if answers else None)
            await process.wait(seconds)
            watchdog.close()
            return process.status
        finally:
            process.kill()
            await process.wait(seconds)

    return asyncio.run(scenario())


@attack(
    "a store or fork server runs and does not answer its agent",
    holds="it is killed when the time for an answer is over, and replaced",
    reads="in the agent's log: which process has not answered for how long",
)
def test_a_process_that_does_not_answer_is_killed() -> None:
    """One that answers is left alone; one that is stopped is not waited for."""
    assert watched(answers=False) == -signal.SIGKILL
    assert watched(answers=True, stop=True) == -signal.SIGKILL
    assert watched(answers=True, seconds=1.0) is None
