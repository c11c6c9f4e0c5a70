"""What every platform does, whatever wrote it: the contract of `midstep.platforms.base`, with real agents."""

import os
import signal

import psutil

from midstep.protocol.messages import (
    CreateNode,
    DeleteNode,
    KillNode,
    NodeJoined,
    NodeLost,
    NodeRefused,
    PlatformJoined,
)

from .ordering import HostedPlatform, OrderingController, eventually


async def has_joined(controller: OrderingController, node: str) -> None:
    """Wait until a node's agent has joined."""
    await controller.until(NodeJoined, lambda joined: joined.node == node)


async def joins_when_there_is_room(controller: OrderingController, node: str) -> None:
    """Order a node, again each time that it is refused, as it is while another one that is to go takes its place."""
    asked = 0

    def joined() -> bool:
        nonlocal asked
        if sum(each.node == node for each in controller.all(NodeRefused)) == asked:
            controller.order(CreateNode(node))
            asked += 1
        return any(each.node == node for each in controller.all(NodeJoined))

    await eventually(joined, f"{node} to join")


async def it_makes_nodes_by_name_and_says_which_it_has(
    controller: OrderingController, platform: HostedPlatform, *, refuses: bool = True
) -> None:
    """Each controller hears it. A node that it cannot make is refused, unless it waits for a machine for it."""
    said = await controller.until(PlatformJoined)
    assert (said.can_create, said.can_kill, said.nodes) == (True, True, ())

    for node in ("node0", "node0", "node7"):
        controller.order(CreateNode(node))
    await has_joined(controller, "node0")
    await has_joined(controller, "node7")
    if refuses:
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


async def a_node_that_ends_unasked_is_lost_once_and_one_that_was_deleted_is_not(
    controller: OrderingController, platform: HostedPlatform
) -> None:
    """However it ends: killed by order of the controller, or by a signal from elsewhere."""
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

    controller.order(CreateNode("node3"))
    controller.order(DeleteNode("node3"))  # it may be about to start
    await joins_when_there_is_room(controller, "node4")
    await eventually(lambda: platform.agent_of("node3") is None, "the end of the node that was hardly asked for")

    controller.end_job()
    await platform.ended()
    assert controller.lost() == ["node1", "node2"]
