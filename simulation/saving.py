"""Checkpoints that parked ranks write: in parts, and complete only when everything is in them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..protocol.messages import SaveCheckpoint
from ..protocol.types import CheckpointTrace
from .invariants import Invariant

if TYPE_CHECKING:
    from .process import Process

DIRECTORY = "/checkpoints"
Part = str | int  # a shard, or the rank of a rank-local state


class Saving:
    """What has been written so far, by attempt. `disk` gets the steps of those that are complete."""

    def __init__(self, disk: set[int]) -> None:
        self._disk = disk
        self._parts: dict[tuple[int, int], set[Part]] = {}  # (generation, step) -> what is there
        self.failures = 0  # how many could not be written, or not be made complete
        self.ever = False  # whether a checkpoint has been complete, whatever became of it
        self.spoiled = False  # whether something was done to those that were
        self.unlisted = False  # whether the directory cannot be listed

    def complete(self, step: int) -> None:
        """A checkpoint has got its name."""
        self._disk.add(step)
        self.ever = True

    def spoil(self, steps: Iterable[int]) -> None:
        """Damage what is on the disk: it is seen before it is loaded, and passed over."""
        self._disk.difference_update(tuple(steps))
        self.spoiled = True

    def survey(self) -> tuple[tuple[int, ...], CheckpointTrace]:
        """Return what a process finds in the directory."""
        if self.unlisted:
            return (), CheckpointTrace(DIRECTORY, unlisted="input/output error")
        unusable = "damaged" if self.ever and not self._disk else ""
        return tuple(sorted(self._disk)), CheckpointTrace(DIRECTORY, unusable=unusable)

    def write(self, process: "Process", order: SaveCheckpoint) -> str:
        """Write what a rank was told to, and every rank-local state of the step that it has; return what went wrong."""
        held = process.memory.shards
        wrong = {shard: held.get(shard) for shard in order.shards if held.get(shard) != order.step}
        if wrong:
            what = f"rank {process.rank} writes {wrong} into a checkpoint of step {order.step}"
            process.world.fail(Invariant.SAME_NUMBERS, what)
        parts = self._parts.setdefault((order.generation, order.step), set())
        parts.update(order.shards)
        parts.update(copy.rank for copy in process.seat.copies() if copy.step == order.step)
        if not order.publish:
            return ""
        ranks = range(process.world_size)
        unsaid = sorted(set(ranks) - parts)  # the rank-local states are what a process looks for before it publishes
        if unsaid:
            self.failures += 1
            return f"the checkpoint lacks the rank-local states of ranks {unsaid}"
        lost = {shard for rank in ranks for shard in process.world.shards(rank, len(ranks))} - parts
        if lost:
            what = f"rank {process.rank} publishes a checkpoint of step {order.step} without {sorted(lost)}"
            process.world.fail(Invariant.NOTHING_LOST, what)
        self.complete(order.step)
        return ""
