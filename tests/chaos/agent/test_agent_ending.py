"""An agent ends everything that it has started, whatever ends the agent; and outlives its controller."""

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest

from midstep.protocol.exits import hear_for_all
from midstep.protocol.messages import (
    ArmFault,
    EndJob,
    NodeHeartbeat,
    NodeJoined,
    NodeLost,
    ProbeProgress,
    ProcessExited,
    ProgressReported,
)
from midstep.protocol.types import ArmedFault, FaultAction

from .conftest import SETTINGS

pytestmark = pytest.mark.chaos

Play = Callable[..., None]

SLEEP = "import time\nprint('running', flush=True)\ntime.sleep(600)\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
POLITE = """
import os, signal, sys, time
def leave(number, frame):
    os.write(1, b"asked to leave\\n")  # it may come in the middle of a print
    sys.exit(4)
signal.signal(signal.SIGTERM, leave)
print("running", flush=True)
time.sleep(600)
"""
DETACHED = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n" + SLEEP
HOUR_S = 3600.0
STATUSES = {POLITE: 4, DEAF: -9, DETACHED: -15}


async def two_ranks(site: Any, script: str, **changes: Any) -> list[int]:
    """Start two ranks and wait until they run; return their pids."""
    await site.agent()
    site.welcome(script, **changes)
    pids = []
    for rank in (0, 1):
        site.start(rank)
        pids.append((await site.started(rank)).process.pid)
        await site.says(rank, "running")
    return pids


@pytest.mark.parametrize("when", ["starting", "running"])
def test_a_killed_agent_leaves_no_process(play: Play, when: str) -> None:
    async def scenario(site: Any) -> None:
        if when == "running":
            await two_ranks(site, DEAF)
        else:
            await site.agent()
        site.agents["node0"].kill()

        assert await site.gone() == -9

    play(scenario)


@pytest.mark.parametrize(
    ("how", "script"),
    [("life", POLITE), ("life", DEAF), ("SIGTERM", DETACHED), ("SIGINT", POLITE), ("EndJob", POLITE)],
    ids=["life", "life-deaf", "SIGTERM-detached", "SIGINT", "EndJob"],
)
def test_the_end_of_the_job_ends_everything_on_the_node(play: Play, how: str, script: str) -> None:
    async def scenario(site: Any) -> None:
        pids = await two_ranks(site, script)
        if how == "life":
            site.let_go()
        elif how == "EndJob":
            site.controller.order(EndJob(exit_code=0, reason="all done"))
        else:
            site.agents["node0"].send_signal(signal.Signals[how])

        assert await site.gone() == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not (site.root / "node0").exists()
        exits = {body.process.rank: body for body in site.controller.all(ProcessExited)}
        assert all(body.expected for body in exits.values())
        assert {body.status for body in exits.values()} == {STATUSES[script]}
        if script == POLITE:
            assert "asked to leave" in site.log(0)

    play(scenario)


def test_an_agent_that_leaves_sigterm_to_its_launcher_stays_with_its_ranks_and_ends_with_it(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that ignore it, too, are not given the time that is for those who act on it."""
    said: dict[str, str] = {}
    hear_for_all(said)
    for name, value in said.items():
        monkeypatch.setenv(name, value)

    async def scenario(site: Any) -> None:
        pids = await two_ranks(site, SLEEP, settings=msgspec.structs.replace(SETTINGS, stop_grace_s=HOUR_S))
        for pid in (site.agents["node0"].pid, *pids):
            os.kill(pid, signal.SIGTERM)
        site.controller.order(ProbeProgress(probe=1))
        await site.controller.until(ProgressReported)
        assert all(psutil.pid_exists(pid) for pid in pids)
        site.let_go()

        assert await site.gone() == 0
        assert {body.status for body in site.controller.all(ProcessExited)} == {-signal.SIGKILL}

    play(scenario)


def test_a_stopped_rank_does_not_hold_up_the_end(play: Play) -> None:
    async def scenario(site: Any) -> None:
        pids = await two_ranks(site, SLEEP)
        os.kill(pids[0], signal.SIGSTOP)
        site.let_go()

        assert await site.gone() == 0

    play(scenario)


def test_an_agent_whose_launcher_dies_while_it_starts_ends_too(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.let_go()

        assert await site.gone() == 0

    play(scenario)


def test_a_node_that_is_killed_on_purpose_is_gone_with_everything(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await two_ranks(site, DETACHED)
        site.controller.order(ArmFault(fault=ArmedFault(rank=0, action=FaultAction.KILL_NODE)))

        assert await site.gone() == -9

    play(scenario)


def test_ranks_run_on_without_a_controller_and_the_next_one_is_told_of_them(play: Play) -> None:
    async def scenario(site: Any) -> None:
        pids = await two_ranks(site, SLEEP)
        site.controller.restart()
        await site.controller.until(NodeHeartbeat)  # so it is known how to reach the agent
        site.welcome(SLEEP)  # a restarted controller welcomes the nodes that its journal names

        joined = await site.controller.until(NodeJoined)
        assert [process.pid for process in joined.processes] == pids
        assert [process.rank for process in joined.processes] == [0, 1]

    play(scenario)


def test_what_happens_while_there_is_no_controller_is_reported_to_the_next(play: Play) -> None:
    async def scenario(site: Any) -> None:
        pids = await two_ranks(site, SLEEP)
        site.controller.router.detach()
        os.kill(pids[1], signal.SIGKILL)
        await site.eventually(lambda: not psutil.pid_exists(pids[1]), "the end of rank 1")
        site.controller.restart()

        exited = await site.exited(1)
        assert (exited.status, exited.process.pid) == (-9, pids[1])

    play(scenario)


def test_an_agent_that_its_controller_outlives_is_lost_before_its_ranks_are(play: Play) -> None:
    """Else their ends would be answered by starting them here again."""

    async def scenario(site: Any) -> None:
        await site.agent("node0", "--outlived")
        site.welcome(SLEEP)
        site.start(0)
        await site.says(0, "running")
        site.let_go()
        await site.gone()
        said = [type(each.body) for each in site.controller.heard if isinstance(each.body, NodeLost | ProcessExited)]
        assert said == [NodeLost, ProcessExited]

    play(scenario)
