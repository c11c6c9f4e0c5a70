"""What happens to the controller, and what an operator asks of it."""

import random
from typing import TYPE_CHECKING

from ..controller.events import InjectRequested, KillNodeRequested, StopRequested
from ..protocol.types import ArmedFault, FaultAction

if TYPE_CHECKING:
    from .world import World

FAULT_ACTIONS = (FaultAction.KILL, FaultAction.STOP, FaultAction.RAISE, FaultAction.KILL_NODE)
LIVES_ON_S = (0.6, 3.0, 20.0)  # how long a controller that was taken for dead goes on


def crash_controller(world: "World", chance: random.Random) -> str:
    """The controller dies: now, between recording the next event and acting on it, or in the middle of acting."""
    way = chance.random()
    if way < 0.3:
        world.controller.crash()
    else:
        world.controller.crash_next = 0 if way < 0.65 else chance.choice((1, 1, 2, 3))
    return "the controller crashes"


def freeze_controller(world: "World", chance: random.Random) -> str:
    """The controller is stopped long enough for the next one to take over, and then goes on as if nothing were."""
    world.controller.lives_on_s = chance.choice(LIVES_ON_S)
    world.controller.crash_next = chance.choice((0, 1, 1, 2))
    return f"the controller will be taken for dead, and go on for {world.controller.lives_on_s} s"


def request_stop(world: "World", chance: random.Random) -> str:
    """An operator stops the job; in a hurry, twice."""
    for _ in range(chance.choice((1, 1, 2))):
        world.controller.tell(StopRequested("the operator asks"))
    return "a stop is requested"


def inject(world: "World", chance: random.Random) -> str:
    """An operator injects a fault into a rank."""
    rank, action = chance.randrange(world.size), chance.choice(FAULT_ACTIONS)
    agent = world.agents.get(world.controller.machine.state.world.holders[rank].node)
    process = agent.hosts(rank) if agent is not None else None
    starting = not world.controller.machine.state.ever_resilient
    if process is None or (action is FaultAction.STOP and (starting or process.watched_by_nobody)):
        return "nobody to inject a fault into"
    for each in agent.processes() if agent is not None and action is FaultAction.KILL_NODE else [process]:
        each.harmed = True
    world.controller.tell(InjectRequested(ArmedFault(rank, action)))
    return f"an operator injects {action} into rank {rank}"


def ask_to_kill_node(world: "World", chance: random.Random) -> str:
    """An operator has a node killed; perhaps one that nobody knows."""
    names = [agent.name for agent in world.agents.values() if agent.alive] + ["nowhere"]
    world.controller.tell(KillNodeRequested(name := chance.choice(names)))
    return f"an operator has {name} killed"
