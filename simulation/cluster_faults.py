"""Faults of nodes, of the network between them and the controller, of devices, and of the platform."""

import random
from typing import TYPE_CHECKING

from ..controller.events import NodeReturned
from ..controller.world import NodeState
from ..policies.fault_levels import TREATMENTS, Treatment
from ..protocol.types import Assertion, FaultKind, FaultLevel
from .process_faults import victim

if TYPE_CHECKING:
    from .node import Agent
    from .world import World

CUTS_S = (0.5, 2.0, 10.0, 100.0)
ISOLATED_S = (5.0, 10.0, 30.0)  # shorter than silence is held
HARMLESS_S = 2.0  # what is shorter than this must cost nobody his process
STANDSTILLS_S = (1.0, 10.0, 600.0)
LEVELS = tuple(level for level in FaultLevel if level not in {FaultLevel.SOFTWARE})
_OF_THE_NODE = frozenset({Treatment.CLOSE, Treatment.LEAVE})  # then all who are there may be replaced
_OF_THE_RANK = frozenset({Treatment.RESTART, Treatment.LEAVE})  # then whose it is gets another process
DEVICE_KINDS = (FaultKind.DEVICE, FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT, FaultKind.LINK, FaultKind.OUT_OF_MEMORY)
NODE_KINDS = (FaultKind.NODE, FaultKind.SWITCH, FaultKind.NETWORK, FaultKind.STORAGE)


def _node(world: "World", chance: random.Random) -> "Agent | None":
    alive = [agent for agent in world.agents.values() if agent.alive]
    return chance.choice(alive) if alive else None


def kill_node(world: "World", chance: random.Random) -> str:
    """A node dies."""
    agent = _node(world, chance)
    if agent is None:
        return "no node to kill"
    world.kill_node(agent.name)
    return f"{agent.name} is killed"


def cut_off_node(world: "World", chance: random.Random) -> str:
    """A node lives and is not heard for a while, or hears nothing, or both."""
    agent = _node(world, chance)
    if agent is None:
        return "no node to cut off"
    until_s = world.timeline.now + (seconds := chance.choice(CUTS_S))
    deaf, mute = chance.choice(((True, True), (True, True), (True, False), (False, True)))
    agent.deaf_until_s = until_s if deaf else agent.deaf_until_s
    agent.mute_until_s = until_s if mute else agent.mute_until_s
    for process in agent.processes():
        process.harmed = process.harmed or seconds > HARMLESS_S
    ways = "cut off" if deaf and mute else "deaf" if deaf else "mute"
    return f"{agent.name} is {ways} for {seconds} s"


def isolate_controller(world: "World", chance: random.Random) -> str:
    """The controller is cut off from all nodes, or from all but one, while the ranks train on."""
    alive = [agent for agent in world.agents.values() if agent.alive]
    if not alive or any(agent.isolated_until_s > world.timeline.now for agent in alive):
        return "no node to be isolated from, or it is"
    spared = chance.choice(alive) if len(alive) > 2 and chance.random() < 0.3 else None
    seconds = chance.choice(ISOLATED_S)
    for agent in alive:
        if agent is not spared:
            agent.isolated_until_s = world.timeline.now + seconds
    return f"the controller is cut off from {len(alive) - (spared is not None)} nodes for {seconds} s"


def storm(world: "World", chance: random.Random) -> str:
    """The network between controller and nodes gets much worse for a while."""
    seconds = chance.choice((0.5, 5.0, 30.0))
    world.network.worsen(world.timeline.now + seconds, loss=chance.choice((0.2, 0.5)), delay_s=chance.choice((0.05, 1)))
    return f"the network is bad for {seconds} s"


def strike_store(world: "World", chance: random.Random) -> str:
    """A rendezvous store dies and comes back elsewhere, or stands still until its agent sees it."""
    agent = _node(world, chance)
    if agent is None:
        return "no store to strike"
    if chance.random() < 0.5:
        agent.move_store()
        return f"the store of {agent.name} moves"
    agent.freeze_store(seconds := chance.choice(STANDSTILLS_S))
    return f"the store of {agent.name} is frozen for {seconds} s"


def add_node(world: "World", chance: random.Random) -> str:
    """A node comes that nobody has asked for."""
    world.add_agent(name := f"stranger{chance.randrange(1000)}")
    return f"{name} comes"


def hear_node(world: "World", chance: random.Random) -> str:
    """A word of a node that was given up for lost comes through; or it was late, and the node is back already."""
    nodes = world.controller.machine.state.world.nodes.values()
    names = [node.name for node in nodes if node.state is NodeState.LOST] or [node.name for node in nodes]
    if not names:
        return "no node to hear"
    name = chance.choice(names)
    world.controller.tell(NodeReturned(name))
    return f"{name} is heard"


def device_fault(world: "World", chance: random.Random) -> str:
    """A detector reports the device of a rank, at any level."""
    process = victim(world, chance)
    if process is None:
        return "no device to report"
    kind, level = chance.choice(DEVICE_KINDS), chance.choice(LEVELS)
    node = process.seat.agent
    node.harmed = node.harmed or TREATMENTS[level] in _OF_THE_NODE
    process.harmed = process.harmed or TREATMENTS[level] in _OF_THE_RANK
    node.report_device(kind, level, process.rank)
    return f"a device fault {kind} {level} of rank {process.rank} on {node.name}"


def node_fault(world: "World", chance: random.Random) -> str:
    """A detector reports a machine, or what connects it."""
    agent = _node(world, chance)
    if agent is None:
        return "no node to report"
    kind, level = chance.choice(NODE_KINDS), chance.choice(LEVELS)
    agent.harmed = agent.harmed or TREATMENTS[level] in _OF_THE_NODE | {Treatment.RESTART}
    agent.broken = agent.broken or TREATMENTS[level] in _OF_THE_RANK
    agent.report_device(kind, level, None)
    return f"a node fault {kind} {level} of {agent.name}"


def unwell_node(world: "World", chance: random.Random) -> str:
    """A detector says that a node works and is not well, or that it is well again."""
    agent = _node(world, chance)
    if agent is None:
        return "no node to be not well"
    assertion = chance.choice((Assertion.OCCUR, Assertion.OCCUR, Assertion.RECOVER))
    agent.report_device(FaultKind.NODE, FaultLevel.SUB_HEALTH, None, assertion)
    return f"{agent.name} is not well: {assertion}"


def tire_platform(world: "World", chance: random.Random) -> str:
    """The platform has no more machines, or does not answer any more."""
    world.platform.capacity = 0
    world.platform.silent = chance.random() < 0.5
    return "the platform does not answer" if world.platform.silent else "the platform has no more machines"


def refuse_again(world: "World", chance: random.Random) -> str:
    """The platform says of some node that it cannot be had: once more, or without having been asked."""
    name = chance.choice([*world.machine.state.world.nodes, "nowhere"])
    world.platform.refuse(name)
    return f"the platform refuses {name}"
