"""What goes wrong, and when: drawn from the seed; by the clock, by place, or by how much the controller has seen."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..controller.events import StopRequested
from ..protocol.types import Activity

if TYPE_CHECKING:
    from .process import Process
    from .world import World

Deed = Callable[["World", random.Random], str]


def _victim(world: "World", chance: random.Random, unwatched: frozenset[Activity] = frozenset()) -> "Process | None":
    """Draw a process; not one whose activity is `unwatched`."""
    living = [process for process in world.living() if not process.suspended and process.activity not in unwatched]
    return chance.choice(living) if living else None


def _unwatched(world: "World") -> frozenset[Activity]:
    """Return in what a process may stand still for ever: in a checkpoint, and on its way to a train function."""
    starting = frozenset() if world.controller.machine.state.ever_resilient else frozenset({Activity.STARTING})
    return starting | {Activity.CHECKPOINTING}


def kill_rank(world: "World", chance: random.Random) -> str:
    """A process dies."""
    process = _victim(world, chance)
    if process is None:
        return "nobody to kill"
    process.harmed = True
    process.end(-9)
    return f"rank {process.rank} is killed"


def kill_newcomer(world: "World", chance: random.Random) -> str:
    """The latest process dies."""
    process = max(world.living(), key=lambda each: each.pid, default=None)
    if process is None:
        return "nobody to kill"
    process.harmed = True
    process.end(-11)
    return f"newcomer {process.rank} is killed"


def stop_rank(world: "World", chance: random.Random) -> str:
    """A process is stopped by a signal, and stays there."""
    process = _victim(world, chance, _unwatched(world))
    if process is None:
        return "nobody to stop"
    process.suspended = process.harmed = True
    return f"rank {process.rank} is stopped in {process.session.stage}, {process.activity}"


def hang_rank(world: "World", chance: random.Random) -> str:
    """A train thread hangs; the control thread lives."""
    process = _victim(world, chance, _unwatched(world))
    if process is None or world.size == 1:  # who is slow alone holds up nobody, and cannot be told from who hangs
        return "nobody to hang"
    process.hung = process.harmed = True
    return f"rank {process.rank} hangs in {process.session.stage}, {process.activity}"


def raise_in_rank(world: "World", chance: random.Random) -> str:
    """The next step of a rank raises."""
    process = _victim(world, chance)
    if process is None:
        return "nobody to raise"
    process.raising = process.harmed = True
    return f"rank {process.rank} will raise"


def kill_node(world: "World", chance: random.Random) -> str:
    """A node dies."""
    names = [agent.name for agent in world.agents.values() if agent.alive]
    if not names:
        return "no node to kill"
    name = chance.choice(names)
    world.kill_node(name)
    return f"{name} is killed"


def cut_off_node(world: "World", chance: random.Random) -> str:
    """A node cannot be reached for a while, and lives."""
    names = [agent.name for agent in world.agents.values() if agent.alive]
    if not names:
        return "no node to cut off"
    agent = world.agents[chance.choice(names)]
    seconds = chance.choice((0.5, 2.0, 10.0, 100.0))
    agent.cut_off_until_s = world.timeline.now + seconds
    for process in agent.processes():
        process.harmed = process.harmed or seconds > 2.0
    return f"{agent.name} is cut off for {seconds} s"


def cut_link(world: "World", chance: random.Random) -> str:
    """A link between two ranks breaks."""
    pair = [process for process in world.living() if process.group is not None][:2]
    for process in pair:
        assert process.group is not None
        process.group.cut(process)
    return f"the link of ranks {[process.rank for process in pair]} breaks"


def freeze_collectives(world: "World", chance: random.Random) -> str:
    """Collectives hang, with nobody at fault."""
    for process in world.living():
        if process.group is not None:
            process.group.frozen = True
    return "all collectives hang"


def flaky_links(world: "World", chance: random.Random) -> str:
    """The next communicators do not come up."""
    world.flaky_links += chance.choice((1, 2, 4, 6))
    return f"the next {world.flaky_links} link-ups fail"


def corrupt(world: "World", chance: random.Random) -> str:
    """The next transfer has a wrong checksum."""
    world.corruptions += 1
    return "the next transfer is corrupted"


def refuse_start(world: "World", chance: random.Random) -> str:
    """The next process cannot be started."""
    world.refused_starts += 1
    return "the next start fails"


def crash_controller(world: "World", chance: random.Random) -> str:
    """The controller dies, now or between recording the next event and acting on it."""
    if chance.random() < 0.5:
        world.controller.crash()
    else:
        world.controller.crash_next = True
    return "the controller crashes"


def request_stop(world: "World", chance: random.Random) -> str:
    """An operator stops the job."""
    world.controller.tell(StopRequested("the operator asks"))
    return "a stop is requested"


DEEDS: tuple[tuple[int, Deed], ...] = (
    (6, kill_rank),
    (3, kill_newcomer),
    (3, stop_rank),
    (2, hang_rank),
    (3, raise_in_rank),
    (3, kill_node),
    (2, cut_off_node),
    (3, cut_link),
    (1, freeze_collectives),
    (2, flaky_links),
    (1, corrupt),
    (1, refuse_start),
    (5, crash_controller),
    (1, request_stop),
)


PLACES = ("ready", "updating", "quiesced", "joined", "rebuild", "repair", "rollback")


def plan(world: "World", chance: random.Random) -> None:
    """Draw the faults of one run: the first somewhere in it, the next at any distance, down to nothing."""
    delay_s = chance.uniform(0.0, 6.0)
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 6, 9))):
        deed = chance.choices([each for _, each in DEEDS], [weight for weight, _ in DEEDS])[0]
        way = chance.random()
        if way < 0.25:
            world.strike_at(chance.choice(PLACES), deed)
        elif way < 0.7:
            world.timeline.after(delay_s, lambda deed=deed: world.strike(deed))  # type: ignore[misc]
        else:
            world.strike_after(chance.randrange(1, 150), deed)
        delay_s += chance.choice((0.0, 0.01, 0.1, 0.5, 2.0, 20.0)) * chance.random()
