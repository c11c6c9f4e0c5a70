"""Where no platform is there, the nodes' own agents carry out what one would be told."""

import pytest

from midstep.protocol.exits import ANOTHER_NODE
from midstep.protocol.messages import CreateNode, DeleteNode, KillNode, NodeJoined, NodeLost

from .conftest import Joined
from .ordering import HostedPlatform, OrderingController, Play

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("play", [Joined], indirect=True, ids=["hosts"])
def test_agents_that_have_joined_by_themselves_leave_or_die_when_they_are_told_to(play: Play) -> None:
    async def scenario(controller: OrderingController, platform: HostedPlatform) -> None:
        assert isinstance(platform, Joined)
        await controller.until(NodeJoined, lambda joined: joined.node == "m0")
        await controller.until(NodeJoined, lambda joined: joined.node == "m1")
        controller.order(CreateNode("m2"))  # nobody can; it is logged, for the user to start one
        controller.order(KillNode("m1"))
        assert await platform.exit_code("m1") == -9
        controller.order(DeleteNode("m0"))
        assert await platform.exit_code("m0") == ANOTHER_NODE
        assert controller.all(NodeLost) == []

    play(scenario)
