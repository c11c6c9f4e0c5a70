"""Checks the order of a step, and what a rank says of itself, against what its process really holds."""

from collections import defaultdict
from typing import TYPE_CHECKING

from ..protocol.types import StepReport
from .invariants import Invariant

if TYPE_CHECKING:
    from .communicators import Group
    from .process import Process
    from .world import World


class StepWatch:
    """Looks on at every commit barrier, every update and every report for barrier one."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._met: defaultdict[tuple[Group | None, int], set[int]] = defaultdict(set)  # who has entered which barrier

    def meets(self, process: "Process") -> None:
        """Nothing lost: who enters the commit barrier has final gradients, its local state and its ward's."""
        step, ward = process.standing.count + 1, self._world.ward(process.rank, process.world_size)
        own = all(process.seat.copy_of(rank, step) is not None for rank in (process.rank, ward))
        if process.memory.gradients != step or not own:
            what = f"rank {process.rank} enters the commit barrier of step {step}, and is not ready"
            self._world.fail(Invariant.NOTHING_LOST, what)
        self._met[process.group, step].add(process.rank)

    def updating(self, process: "Process") -> None:
        """Same step: nobody begins an update before everybody has entered its commit barrier."""
        step = process.standing.count + 1
        missing = set(range(process.world_size)) - self._met[process.group, step]
        if process.memory.gradients != step or missing:
            what = f"rank {process.rank} begins update {step} before ranks {sorted(missing)} were ready for it"
            self._world.fail(Invariant.SAME_STEP, what)

    def reports(self, process: "Process", report: StepReport) -> None:
        """Same numbers: what a rank says at barrier one is what it holds."""
        memory, step = process.memory, report.committed
        finals = memory.gradients == step + 1
        held = all(memory.shards[hold.shard_id] == step for hold in report.holds)
        if (report.clean and memory.stands != step) or report.ready > finals or not held:
            what = f"rank {process.rank} reports {report}, and holds {memory.shards}, gradients of {memory.gradients}"
            self._world.fail(Invariant.SAME_NUMBERS, what)
        whole = len(memory.left) == len(memory.shards)  # an update of what was struck is worth nothing
        if finals and whole and report.clean and not report.ready:
            self._world.fail(
                Invariant.NOTHING_LOST, f"rank {process.rank} could finish update {step + 1}, and denies it"
            )
