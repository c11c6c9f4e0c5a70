"""Faults of training processes: they die, hang, raise, are stopped, slow down, or say what is not true."""

import random
from typing import TYPE_CHECKING

from ..protocol.types import Activity, FaultKind, FaultLevel
from .lies import Lie
from .train_function import MENDABLE, Place

if TYPE_CHECKING:
    from .process import Process
    from .world import World

SLOW_DOWNS = (5.0, 30.0, 200.0)


def victim(world: "World", chance: random.Random, unwatched: frozenset[Activity] = frozenset()) -> "Process | None":
    """Draw a process; not one whose activity is `unwatched`."""
    living = [process for process in world.living() if not process.suspended and process.activity not in unwatched]
    return chance.choice(living) if living else None


def _unwatched(world: "World") -> frozenset[Activity]:
    """Return in what a process may stand still for ever: in a checkpoint, on its way to a train function, at the end.

    Whether a train function that nobody else waits for has come to its end only its process can say.
    """
    starting = frozenset() if world.controller.machine.state.ever_resilient else frozenset({Activity.STARTING})
    finished = frozenset({Activity.FINISHED}) if world.size == 1 else frozenset()
    return starting | finished | {Activity.CHECKPOINTING}


def kill_rank(world: "World", chance: random.Random) -> str:
    """A process dies."""
    process = victim(world, chance)
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
    process = victim(world, chance, _unwatched(world))
    if process is None:
        return "nobody to stop"
    process.harmed = True
    process.suspend()
    return f"rank {process.rank} is stopped in {process.session.stage}, {process.activity}"


def hang_rank(world: "World", chance: random.Random) -> str:
    """A train thread hangs; the control thread lives.

    Never in all ranks at once: they would hold up nobody, and could not be told from a world that is slow together.
    """
    process = victim(world, chance, _unwatched(world))
    if process is None or sum(each.hung for each in world.living() if each is not process) + 1 >= world.size:
        return "nobody to hang"
    process.hung = process.harmed = True
    return f"rank {process.rank} hangs in {process.session.stage}, {process.activity}"


def slow_down_rank(world: "World", chance: random.Random) -> str:
    """A rank computes more slowly from now on."""
    process = victim(world, chance)
    if process is None:
        return "nobody to slow down"
    process.slowness, process.harmed = chance.choice(SLOW_DOWNS), True
    return f"rank {process.rank} computes {process.slowness:g} times as long"


def raise_in_rank(world: "World", chance: random.Random) -> str:
    """The next step of a rank raises."""
    process = victim(world, chance)
    if process is None:
        return "nobody to raise"
    process.raising = process.harmed = True
    return f"rank {process.rank} will raise"


def strike_rank(world: "World", chance: random.Random) -> str:
    """Memory or a link of a rank is hit somewhere in its next step, and its process can mend that."""
    process = victim(world, chance)
    if process is None:
        return "nobody to strike"
    kind, place = chance.choice(sorted(MENDABLE)), chance.choice((Place.COMPUTING, *Place))
    process.hits[place], process.harmed = kind, True
    return f"rank {process.rank} will be struck {place.value}: {kind}"


def tear_update(world: "World", chance: random.Random) -> str:
    """The next update of a rank raises, halfway."""
    process = victim(world, chance)
    if process is None:
        return "nobody to raise"
    process.hits[Place.UPDATE], process.harmed = FaultKind.EXCEPTION, True
    return f"rank {process.rank} will raise in its update"


def strike_and_tell(world: "World", chance: random.Random) -> str:
    """Memory of a rank is hit in its next step, and a detector of its node says so: sooner or later than the rank."""
    process = victim(world, chance)
    if process is None:
        return "nobody to strike"
    agent, rank = process.seat.agent, process.rank
    process.hits[chance.choice((Place.COMPUTING, *Place))] = FaultKind.MEMORY
    process.harmed = True
    level = chance.choice((FaultLevel.RESTART_REQUEST, FaultLevel.RESTART_BUSINESS))

    def tell() -> None:
        present = agent.hosts(rank)
        if present is not None:  # it may be another one by now, and is what the detector speaks of
            present.harmed = True
        if agent.alive:
            agent.report_device(FaultKind.MEMORY, level, rank)

    world.timeline.after(chance.choice((0.0, 0.1, 0.3, 2.0)), tell)
    return f"rank {rank} will be struck: {FaultKind.MEMORY}, and {agent.name} reports it"


def lie(world: "World", chance: random.Random) -> str:
    """A process says something wrong the next time that it can."""
    process = victim(world, chance, _unwatched(world))
    if process is None:
        return "nobody to lie"
    process.lie = chance.choice(list(Lie))
    process.harmed = process.harmed or process.lie is not Lie.OLD_WORDS  # what is repeated must do nobody any harm
    return f"rank {process.rank} will lie: {process.lie}"


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


def fail_save(world: "World", chance: random.Random) -> str:
    """The next emergency checkpoint cannot be written."""
    world.failing_saves += 1
    return "the next emergency checkpoint fails"
