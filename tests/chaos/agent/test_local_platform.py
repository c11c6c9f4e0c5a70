"""Nodes on this machine come when they are asked for, go when they are told to, and are reported when they are lost."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from midstep.platforms.local import LocalOptions, LocalPlatform
from midstep.protocol.compat import within
from midstep.protocol.keys import JobKeys
from midstep.protocol.messages import CreateNode, DeleteNode, EndJob, KillNode, NodeJoined, NodeLost, NodeRefused
from midstep.protocol.types import PLATFORM, node_address

from .conftest import CHEAP

pytestmark = pytest.mark.chaos

Play = Callable[..., None]

DETACHED = """
import subprocess, time
print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def nodes_of(site: Any, *, log_directory: str | None = None, **changes: Any) -> Iterator[LocalPlatform]:
    """A platform for the site's controller; its agents do not survive the test."""
    options = LocalOptions(
        job="agent-test",
        controller=site.controller.router.endpoint,
        keys=str(site.root / "keys"),
        run_directory=str(site.root),
        log_directory=log_directory or str(site.root),
        grace_s=10.0,
        max_nodes=2,
    )
    environment = {**os.environ, **CHEAP}
    platform = LocalPlatform(options, **{"environment": environment, "domain_of": "rack-of-{}".format, **changes})
    try:
        yield platform
    finally:
        for pid in platform.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def joined(site: Any, node: str) -> NodeJoined:
    found: NodeJoined = await site.controller.until(NodeJoined, lambda body: body.node == node)
    return found


def test_the_nodes_of_a_job_join_with_their_failure_domains_and_close_ends_them(play: Play) -> None:
    async def scenario(site: Any) -> None:
        with nodes_of(site) as platform:
            platform.start(2)
            domains = {(await joined(site, node)).failure_domain for node in ("node0", "node1")}
            pids = list(platform.agents.values())
            await platform.close()

        assert domains == {"rack-of-node0", "rack-of-node1"}
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not site.controller.all(NodeLost)
        assert not list(site.root.glob("node*/"))

    play(scenario)


def test_a_node_whose_agent_is_killed_is_lost_and_nothing_of_it_stays(play: Play) -> None:
    async def scenario(site: Any) -> None:
        with nodes_of(site) as platform:
            platform.start(1)
            await joined(site, "node0")
            site.welcome(DETACHED)
            site.start(0)
            await site.eventually(lambda: site.log(0).endswith("\n"), "the rank's own process")
            below = int(site.log(0))
            os.kill(platform.agents["node0"], signal.SIGKILL)

            lost = await site.controller.until(NodeLost)
            assert (lost.node, lost.reason) == ("node0", "its agent ended with signal 9")
            await site.eventually(lambda: not psutil.pid_exists(below), "the end of what the rank had detached")
            assert not (site.root / "node0").exists()
            await platform.close()

    play(scenario)


def test_the_controller_creates_kills_and_deletes_nodes(play: Play) -> None:
    async def scenario(site: Any) -> None:
        with nodes_of(site) as platform:
            platform.start(1)
            await joined(site, "node0")
            for body in (CreateNode("late"), CreateNode("late"), CreateNode("third"), CreateNode("node0")):
                site.controller.send(body, PLATFORM)
            await joined(site, "late")
            refused = await site.controller.until(NodeRefused)
            assert refused.node == "third"
            assert "one more than 2 nodes" in refused.reason

            keys = JobKeys.folder(site.root / "keys", node_address("late"))
            assert keys.exists()
            site.controller.send(DeleteNode("late"), PLATFORM)
            await site.eventually(lambda: list(platform.agents) == ["node0"], "the end of the deleted node")
            assert not keys.exists()
            site.controller.send(KillNode("node0"), PLATFORM)
            assert (await site.controller.until(NodeLost)).node == "node0"
            site.controller.send(EndJob(exit_code=0, reason="done"), PLATFORM)
            assert [body.node for body in site.controller.all(NodeLost)] == ["node0"]
            await platform.close()

    play(scenario)


def test_the_end_of_the_job_is_handed_to_the_launcher(play: Play) -> None:
    async def scenario(site: Any) -> None:
        told: asyncio.Future[EndJob] = asyncio.get_running_loop().create_future()
        with nodes_of(site, on_end=told.set_result) as platform:
            site.controller.send(EndJob(exit_code=3, reason="enough"), PLATFORM)

            assert (await within(60, told)).exit_code == 3
            platform.create_node(CreateNode("late"))
            assert platform.agents == {}
            await platform.close()

    play(scenario)
