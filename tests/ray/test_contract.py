"""The contract of platforms holds on Ray: the same scenarios as for every other platform, and what only Ray does."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from midstep.protocol.messages import CreateNode, NodeJoined, NodeRefused, PlatformJoined

from ..contract.platforms import scenarios
from ..contract.platforms.ordering import (
    MOST,
    HostedPlatform,
    OrderingController,
    Play,
    Scenario,
    eventually,
    hosting,
)
from .environment import SUITE
from .on_ray import OnRay, RayHere, ray_here

LATE = ("node8", "node9")

Host = Callable[..., Play]


@pytest.fixture(scope="module")
def here() -> Iterator[RayHere]:
    """A Ray with a machine for each node that the scenarios ask for."""
    SUITE.require()
    with ray_here() as made:
        yield made


@pytest.fixture
def host(here: RayHere) -> Iterator[Host]:
    """Host the platform with options of a test; returned is what runs a scenario on it."""
    with ExitStack() as made:

        def make(**options: int) -> Play:
            platforms: list[OnRay] = []

            def on_ray(root: Path) -> OnRay:
                platforms.append(OnRay(root, here, **options))
                return platforms[0]

            play = made.enter_context(hosting(on_ray))
            made.callback(platforms[0].close)

            def told(scenario: Scenario) -> None:
                try:
                    play(scenario)
                except BaseException:
                    print(here.said())
                    raise

            return told

        yield make


def test_it_makes_nodes_by_name_and_says_which_it_has(host: Host) -> None:
    host()(partial(scenarios.it_makes_nodes_by_name_and_says_which_it_has, refuses=False))


def test_a_node_that_ends_unasked_is_lost_once_and_one_that_was_deleted_is_not(host: Host) -> None:
    host()(scenarios.a_node_that_ends_unasked_is_lost_once_and_one_that_was_deleted_is_not)


def test_nodes_without_machines_are_not_refused_and_join_when_there_is_one_for_each(here: RayHere, host: Host) -> None:
    """Until then each controller hears that they are on their way. None shares a machine that has room for two."""

    async def scenario(controller: OrderingController, platform: HostedPlatform) -> None:
        assert isinstance(platform, OnRay)
        nodes = [f"node{number}" for number in range(MOST)]
        for node in nodes:
            controller.order(CreateNode(node))
            await scenarios.has_joined(controller, node)
        for node in LATE:
            controller.order(CreateNode(node))
        await eventually(lambda: set(LATE) <= set(platform.nodes_asked_for), "the orders to arrive")
        controller.succeed()
        controller.order(CreateNode(LATE[0]))
        assert set((await controller.until(PlatformJoined)).nodes) == {*nodes, *LATE}

        machines = [here.add_machine()]
        await controller.until(NodeJoined, lambda joined: joined.node in LATE)
        machines.append(here.add_machine())
        for node in LATE:
            await scenarios.has_joined(controller, node)
        assert len({platform.raylet_of(node) for node in (*nodes, *LATE)}) == MOST + len(LATE)

        for machine in machines:
            here.remove_machine(machine)
        await eventually(lambda: set(LATE) <= set(controller.lost()), "the loss of both")
        await eventually(lambda: not any(map(platform.agent_of, LATE)), "the end of their agents")
        controller.end_job()
        await platform.ended()
        assert sorted(controller.lost()) == sorted(LATE)
        assert controller.all(NodeRefused) == []

    host()(scenario)


def test_a_platform_that_is_started_again_keeps_the_places_of_nodes_that_wait(here: RayHere, host: Host) -> None:
    """The next node gets a place of its own, and all join when there is a machine for each place."""

    async def scenario(controller: OrderingController, platform: HostedPlatform) -> None:
        assert isinstance(platform, OnRay)
        await controller.until(PlatformJoined)
        controller.order(CreateNode("node0"))
        await eventually(lambda: platform.places == {"node0": 0}, "a place for the first")
        platform.restart()
        await eventually(lambda: len(controller.all(PlatformJoined)) == 2, "the next process of the platform")
        controller.order(CreateNode("node1"))
        await eventually(lambda: platform.places == {"node0": 0, "node1": 1}, "a place for the second")

        machine = here.add_machine()
        await scenarios.has_joined(controller, "node0")
        await scenarios.has_joined(controller, "node1")
        controller.end_job()
        await platform.ended()
        assert controller.lost() == []
        here.remove_machine(machine)

    host(places=MOST + 1)(scenario)
