"""Copies in host memory of simulated ranks: taken as the product's cadence says, and watched.

A copy is one number, the step that it is of. It is whole after a while, unless its process is gone by then. The files
are in the rank's place on its node, as they outlive its processes.
"""

from typing import TYPE_CHECKING

from ...processor.copy_cadence import CopyCadence, file_to_write
from ...protocol.errors import HostCopyError
from ...protocol.types import RestoreSource
from ..invariants import Invariant

if TYPE_CHECKING:
    from .process import Process
    from .world import SimulatedWorld

LATE = 0.1  # how often a copy that is due finds the last one not whole
LONGEST_COPY_S = 0.3


class PlayedCopies:
    """One process's view of the copies of its rank."""

    def __init__(self, process: "Process") -> None:
        self._process, self._world = process, process.world
        policy = self._world.policy
        self._on = RestoreSource.HOST_COPY in policy.restore
        self._cadence = CopyCadence(0 if policy.host_copy.every_steps == "auto" else policy.host_copy.every_steps)
        self._under_way: tuple[int, int] | None = None  # file and step
        self._agreed = False
        self.common = 0  # as the last plan says

    def steps(self) -> tuple[int, ...]:
        """Return the steps of which a whole copy is here."""
        self._finish(self._under_way)
        size = self._process.world_size
        return tuple(sorted(step for step, of_size in self._process.place.host_copies if step and of_size == size))

    def resumed(self) -> None:
        """Keep the copy that all have."""
        process, world = self._process, self._world
        files, before = process.place.host_copies, common_copy(world)
        files[:] = [each if each[0] == self.common else (0, 0) for each in files]
        if 0 < before <= process.standing.count and not common_copy(world):
            world.fail(Invariant.NOTHING_LOST, f"rank {process.rank} drops its copy of step {before}, which all have")
        self._under_way, self._agreed = None, False
        self._cadence.resumed(self.common)

    def says(self, votes: dict[int, list[bool]], step: int) -> None:
        """Say at the commit barrier whether this rank is for a copy."""
        if self._on:
            if self._world.chance.random() >= LATE:
                self._finish(self._under_way)
            votes.setdefault(step, []).append(self._cadence.agrees(step))

    def hears(self, votes: dict[int, list[bool]], step: int) -> None:
        """Hear at its end whether all were."""
        self._agreed = self._on and all(votes[step])

    def take(self, step: int) -> None:
        """Begin the copy of a step."""
        if not self._agreed:
            return
        process, world = self._process, self._world
        self._agreed = False
        self._cadence.began(step)
        if not process.memory.is_of(step):
            world.fail(Invariant.SAME_NUMBERS, f"rank {process.rank} copies {process.memory.shards} as of step {step}")
        files, before = process.place.host_copies, common_copy(world)
        file = file_to_write([each for each, _ in files])
        files[file] = (0, 0)
        process.place.damaged.discard(step)
        self._under_way = under_way = (file, step)
        if before and not common_copy(world):
            what = f"rank {process.rank} begins a copy of step {step} over that of {before}, the last that all had"
            world.fail(Invariant.NOTHING_LOST, what)
        world.timeline.after(world.chance.uniform(0.0, LONGEST_COPY_S), lambda: self._finish(under_way))

    def load(self, step: int) -> None:
        """Go back to a copy. Raises HostCopyError where it turns out to be damaged."""
        process, world = self._process, self._world
        if step not in self.steps():
            what = f"rank {process.rank} is told to load its copy of step {step}, and has {process.place.host_copies}"
            world.fail(Invariant.NOTHING_LOST, what)
        if step in process.place.damaged:
            process.place.damaged.discard(step)
            files = process.place.host_copies
            files[:] = [(0, 0) if each[0] == step else each for each in files]
            raise HostCopyError(f"the copy of step {step} is damaged")
        process.memory.load(step)

    def _finish(self, under_way: tuple[int, int] | None) -> None:
        if under_way is None or under_way is not self._under_way or not self._process.alive:
            return
        self._under_way = None
        file, step = under_way
        self._process.place.host_copies[file] = (step, self._process.world_size)
        self._cadence.became_whole(waited_s=0.0, took_s=0.01, step_s=0.1)


def common_copy(world: "SimulatedWorld") -> int:
    """Return the newest step of which every rank has a whole copy where it is now; 0: of none."""
    current = [each for each in world.living() if world.rank_watch.is_current(each)]
    if len({each.rank for each in current}) < world.size:
        return 0
    steps = [{step for step, size in each.place.host_copies if size == each.world_size} for each in current]
    return max(set.intersection(*steps) - {0}, default=0)


def check_target(world: "SimulatedWorld", target: int) -> None:
    """Nothing lost: where all ranks have a copy of one step, none goes back further."""
    if RestoreSource.HOST_COPY not in world.policy.restore or world.machine.state.incident.trusted_step is not None:
        return
    common = common_copy(world)
    if target < common:
        world.fail(Invariant.NOTHING_LOST, f"all go back to step {target}, and have copies of step {common}")
