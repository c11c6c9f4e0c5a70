"""Agents of several nodes on this machine are forks of one process, and do as well without it."""

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from midstep.platforms import forked_agents
from midstep.platforms.local import LocalPlatform
from midstep.protocol.compat import within
from midstep.protocol.messages import CreateNode, NodeLost
from midstep.protocol.types import PLATFORM

from .test_local_platform import joined, nodes_of

pytestmark = pytest.mark.chaos

Play = Callable[..., None]
NODES = ("node0", "node1")
SERVED = {"midstep-forksrv", "midstep-store"}


def forker_of(platform: LocalPlatform) -> psutil.Process:
    """The process of which agents are forked."""
    assert platform.forker is not None
    return psutil.Process(platform.forker)


def lives(pid: int) -> bool:
    """Whether a process runs: the machine's first process may take its time to reap one that has exited."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def names_below(pid: int) -> set[str]:
    """What a process has started."""
    return {child.name() for child in psutil.Process(pid).children()}


def parents(platform: LocalPlatform) -> set[int]:
    """The parents of all agents."""
    return {psutil.Process(pid).ppid() for pid in platform.agents.values()}


def test_each_agent_leads_a_session_and_has_a_fork_server_and_a_store_below_it(play: Play) -> None:
    """As one that is a new interpreter; its ranks run, and their ends are seen."""

    async def scenario(site: Any) -> None:
        with nodes_of(site) as platform:
            platform.start(2)
            for node in NODES:
                await joined(site, node)
            assert parents(platform) == {platform.forker}
            for pid in platform.agents.values():
                assert os.getsid(pid) == pid
                await site.eventually(lambda pid=pid: names_below(pid) >= SERVED, "the processes of a node")
            site.welcome("import os\nprint(os.getppid(), flush=True)\nos._exit(7)")
            site.start(0)
            assert (await site.exited(0)).status == 7
            assert site.log(0).strip() == str(platform.agents["node0"])
            forker = forker_of(platform)
            await platform.close()
        assert not forker.is_running()

    play(scenario)


def test_the_end_of_a_forked_agent_is_reported_as_it_was(play: Play) -> None:
    async def scenario(site: Any) -> None:
        with nodes_of(site) as platform:
            platform.start(2)
            for node in NODES:
                await joined(site, node)
            os.kill(platform.agents["node1"], signal.SIGTERM)
            assert (await site.controller.until(NodeLost)).reason == "its agent ended with status 0"
            os.kill(platform.agents["node0"], signal.SIGABRT)
            lost = await site.controller.until(NodeLost, lambda body: body.node == "node0")
            assert lost.reason == f"its agent ended with signal {int(signal.SIGABRT)}"
            await platform.close()

    play(scenario)


def test_agents_live_on_when_the_process_is_killed_and_the_next_one_is_a_new_interpreter(play: Play) -> None:
    async def scenario(site: Any) -> None:
        with nodes_of(site) as platform:
            platform.start(2)
            for node in NODES:
                await joined(site, node)
            pids = dict(platform.agents)
            forker_of(platform).kill()
            await site.eventually(lambda: platform.forker is None, "the end of the process to be seen")
            assert platform.agents == pids
            site.welcome("import time\ntime.sleep(600)")
            site.start(0)
            await site.started(0)
            os.kill(pids["node1"], signal.SIGKILL)
            assert (await site.controller.until(NodeLost)).reason == "its agent ended with signal 9"
            site.controller.send(CreateNode("late"), PLATFORM)
            await joined(site, "late")
            assert psutil.Process(platform.agents["late"]).ppid() == os.getpid()
            await platform.close()
            assert not any(map(lives, pids.values()))

    play(scenario)


@pytest.mark.parametrize("how", ["killed", "stopped", "missing"])
def test_agents_are_new_interpreters_where_the_process_does_not_fork(
    how: str, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before it has forked, or does not answer in time."""
    if how == "missing":
        monkeypatch.setattr(forked_agents, "PROGRAM", "midstep.agent.nowhere")
    monkeypatch.setattr(forked_agents, "IMPORTS_S", 2.0)

    async def scenario(site: Any) -> None:
        with nodes_of(site) as platform:
            platform.start(2)
            if how != "missing":
                forker_of(platform).send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            assert platform.agents == {}
            for node in NODES:
                await joined(site, node)
            assert parents(platform) == {os.getpid()}
            assert platform.forker is None
            await platform.close()
        assert not site.controller.all(NodeLost)

    play(scenario)


def test_nodes_that_are_asked_for_and_not_there_yet_end_with_the_platform(play: Play) -> None:
    """None of them comes later, and none is reported as lost."""

    async def scenario(site: Any) -> None:
        with nodes_of(site) as platform:
            platform.start(2)
            forker = forker_of(platform)
            await within(30, platform.close())
            assert platform.agents == {}
        assert not forker.is_running()
        assert not site.controller.all(NodeLost)

    play(scenario)
