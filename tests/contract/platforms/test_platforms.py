"""What every platform does, whoever wrote it: the contract of `midstep.platforms.base`, with real agents."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from midstep.protocol.messages import (
    CreateNode,
    DeleteNode,
    KillNode,
    NodeJoined,
    NodeLost,
    NodeRefused,
    PlatformJoined,
)

from .conftest import HostedPlatform, OrderingController, Scenario, eventually

pytestmark = pytest.mark.chaos

Play = Callable[[Scenario], None]


async def has_joined(controller: OrderingController, node: str) -> None:
    await controller.until(NodeJoined, lambda joined: joined.node == node)


def test_it_makes_nodes_by_name_says_which_it_has_and_when_it_can_make_no_more(play: Play) -> None:
    async def scenario(controller: OrderingController, platform: HostedPlatform) -> None:
        said = await controller.until(PlatformJoined)
        assert (said.can_create, said.can_kill, said.nodes) == (True, True, ())

        for node in ("node0", "node0", "node7"):
            controller.order(CreateNode(node))
        await has_joined(controller, "node0")
        await has_joined(controller, "node7")
        controller.order(CreateNode("node8"))
        assert (await controller.until(NodeRefused)).node == "node8"
        assert controller.lost() == []

        controller.succeed()
        controller.order(CreateNode("node0"))  # as it cannot know whether that has arrived
        said = await controller.until(PlatformJoined)
        assert set(said.nodes) == {"node0", "node7"}

        agents = [platform.agent_of(node) for node in ("node0", "node7")]
        controller.end_job()
        await platform.ended()
        await eventually(lambda: not any(pid is None or psutil.pid_exists(pid) for pid in agents), "the agents' end")
        assert controller.lost() == []

    play(scenario)


def test_a_node_that_ends_unasked_is_lost_once_and_one_that_was_deleted_is_not(play: Play) -> None:
    async def scenario(controller: OrderingController, platform: HostedPlatform) -> None:
        controller.order(CreateNode("node0"))
        controller.order(CreateNode("node1"))
        await has_joined(controller, "node0")
        await has_joined(controller, "node1")

        controller.order(DeleteNode("node0"))
        controller.order(DeleteNode("node0"))
        await eventually(lambda: platform.agent_of("node0") is None, "the end of the deleted node")
        controller.order(KillNode("node1"))
        assert (await controller.until(NodeLost)).node == "node1"

        controller.order(CreateNode("node2"))
        await has_joined(controller, "node2")
        pid = platform.agent_of("node2")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        lost = await controller.until(NodeLost, lambda each: each.node == "node2")
        assert "9" in lost.reason

        controller.end_job()
        await platform.ended()
        assert controller.lost() == ["node1", "node2"]

    play(scenario)
