"""Faults of training processes: they die, hang, raise, are stopped, slow down, or say what is not true."""

import enum
import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...protocol.types import Activity, FaultKind, FaultLevel
from .network import Byzantine
from .scripts import MENDABLE, StepPoint

if TYPE_CHECKING:
    from .process import Process
    from .world import SimulatedWorld

Inject = Callable[["SimulatedWorld", random.Random], str]  # does it, and says in words what was done
SLOW_DOWNS = (5.0, 30.0, 200.0)


class OneShot(enum.Enum):
    """An action that fails the next time that it is tried, in whatever process."""

    LINK_UP = "link-up"
    TRANSFER = "transfer"
    START = "start"
    SAVE = "emergency checkpoint"


def victim(
    world: "SimulatedWorld", chance: random.Random, unwatched: frozenset[Activity] = frozenset()
) -> "Process | None":
    """Draw a process; not one whose activity is `unwatched`."""
    living = [process for process in world.living() if not process.suspended and process.activity not in unwatched]
    return chance.choice(living) if living else None


def _unwatched(world: "SimulatedWorld") -> frozenset[Activity]:
    """Return in what a process may stand still for ever: in a checkpoint, on its way to a train function, at the end.

    Whether a train function that no other rank waits for has come to its end only its process can say.
    """
    starting = frozenset() if world.machine.state.ever_resilient else frozenset({Activity.STARTING})
    finished = frozenset({Activity.FINISHED}) if world.size == 1 else frozenset()
    return starting | finished | {Activity.CHECKPOINTING}


def _into_a_process(
    inject: Callable[["SimulatedWorld", random.Random, "Process"], str], *, watched: bool = False
) -> Callable[["SimulatedWorld", random.Random], str]:
    """Draw the process that a fault is injected into; a `watched` one where it must not hang unseen."""

    @functools.wraps(inject)
    def injected(world: "SimulatedWorld", chance: random.Random) -> str:
        process = victim(world, chance, _unwatched(world) if watched else frozenset())
        if process is None:
            return "no process to inject a fault into"
        return inject(world, chance, process)

    return injected


_into_a_watched_process = functools.partial(_into_a_process, watched=True)


@_into_a_process
def kill_rank(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """A process dies."""
    process.faulty = True
    process.end(-9)
    return f"rank {process.rank} is killed"


def kill_newcomer(world: "SimulatedWorld", chance: random.Random) -> str:
    """The latest process dies."""
    process = max(world.living(), key=lambda each: each.pid, default=None)
    if process is None:
        return "no process to kill"
    process.faulty = True
    process.end(-11)
    return f"newcomer {process.rank} is killed"


@_into_a_watched_process
def stop_rank(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """A process is stopped by a signal, and stays there."""
    process.faulty = True
    process.suspend()
    return f"rank {process.rank} is stopped in {process.session.stage}, {process.activity}"


@_into_a_watched_process
def hang_rank(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """A train thread hangs; the control thread lives.

    Never in all ranks at once: none would hold up another, which could not be told from a world that is slow together.
    """
    if sum(each.hung for each in world.living() if each is not process) + 1 >= world.size:
        return "no rank to hang: all others do"
    process.hung = process.faulty = True
    return f"rank {process.rank} hangs in {process.session.stage}, {process.activity}"


@_into_a_process
def slow_down_rank(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """A rank computes more slowly from now on."""
    process.slowness, process.faulty = chance.choice(SLOW_DOWNS), True
    return f"rank {process.rank} computes {process.slowness:g} times as long"


@_into_a_process
def raise_in_rank(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """The next step of a rank raises."""
    process.raising = process.faulty = True
    return f"rank {process.rank} will raise"


@_into_a_process
def fail_mendably(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """Memory or a link of a rank fails somewhere in its next step, and its process can mend that."""
    kind, point = chance.choice(sorted(MENDABLE)), chance.choice((StepPoint.COMPUTING, *StepPoint))
    process.armed[point], process.faulty = kind, True
    return f"rank {process.rank} will fail {point.value}: {kind}"


@_into_a_process
def tear_update(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """The next update of a rank raises, halfway."""
    process.armed[StepPoint.UPDATE], process.faulty = FaultKind.EXCEPTION, True
    return f"rank {process.rank} will raise in its update"


@_into_a_process
def lose_memory_and_report(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """Memory of a rank fails in its next step, and a detector of its node says so: sooner or later than the rank."""
    agent, rank = process.agent, process.rank
    process.armed[chance.choice((StepPoint.COMPUTING, *StepPoint))] = FaultKind.MEMORY
    process.faulty = True
    level = chance.choice((FaultLevel.RESTART_REQUEST, FaultLevel.RESTART_BUSINESS))

    def report() -> None:
        present = agent.hosts(rank)
        if present is not None:  # it may be another one by now, and is what the detector speaks of
            present.faulty = True
        if agent.alive:
            agent.report_device(FaultKind.MEMORY, level, rank)

    world.timeline.after(chance.choice((0.0, 0.1, 0.3, 2.0)), report)
    return f"rank {rank} will lose its memory: {FaultKind.MEMORY}, and {agent.name} reports it"


@_into_a_watched_process
def send_byzantine(world: "SimulatedWorld", chance: random.Random, process: "Process") -> str:
    """A process says something wrong the next time that it can."""
    process.byzantine = kind = chance.choice(list(Byzantine))
    process.faulty = process.faulty or kind is not Byzantine.REPEATED  # what is repeated must do no harm
    return f"rank {process.rank} will send {kind}"


def cut_link(world: "SimulatedWorld", chance: random.Random) -> str:
    """A link between two ranks breaks."""
    pair = [process for process in world.living() if process.group is not None][:2]
    for process in pair:
        assert process.group is not None
        process.group.cut(process)
    return f"the link of ranks {[process.rank for process in pair]} breaks"


def freeze_collectives(world: "SimulatedWorld", chance: random.Random) -> str:
    """Collectives hang, with no rank at fault."""
    for process in world.living():
        if process.group is not None:
            process.group.frozen = True
    return "all collectives hang"


def fail_link_ups(world: "SimulatedWorld", chance: random.Random) -> str:
    """The next communicators do not come up."""
    world.one_shots[OneShot.LINK_UP] += chance.choice((1, 2, 4, 6))
    return f"the next {world.one_shots[OneShot.LINK_UP]} link-ups fail"


def fail_next(what: OneShot) -> Inject:
    """Return the fault that the next try of something fails."""

    def injected(world: "SimulatedWorld", chance: random.Random) -> str:
        world.one_shots[what] += 1
        return f"the next {what.value} fails"

    return injected
