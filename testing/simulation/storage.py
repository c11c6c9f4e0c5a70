"""What the processes of a simulated job really hold, and what is on its disk: the simulation judges by it.

A shard is played by one number, the count of updates in it, so that mixed-up state shows.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...protocol.messages import SaveCheckpoint
from ...protocol.types import CheckpointTrace
from .invariants import Invariant

if TYPE_CHECKING:
    from .process import Process

LOST = -1  # the count of updates in a shard whose memory was hit
TORN = -2  # in one whose update ended halfway
ARRIVING = -3  # and in one that is being overwritten by a repair

DIRECTORY = "/checkpoints"
Part = str | int  # a shard, or the rank of a rank-local state


class Memory:
    """The shards of one process, its rank-local state, and its gradients."""

    def __init__(self, shards: Iterable[str], *, connected: bool) -> None:
        """`connected`: it begins with the others; what a single newcomer begins with is worth nothing."""
        self.shards = dict.fromkeys(shards, 0)
        self.own = 0
        self.gradients: int | None = None  # of which update they are the final ones
        self._updates: int | None = 0 if connected else None

    @property
    def stands(self) -> int | None:
        """The count of updates in everything that is left here; None where that is of no one step."""
        whole = all(count in {self._updates, LOST, ARRIVING} for count in self.shards.values())
        return self._updates if whole else None

    @property
    def left(self) -> list[str]:
        """The shards that are neither lost nor on their way back."""
        return [shard for shard, count in self.shards.items() if count not in {LOST, ARRIVING}]

    @property
    def lost(self) -> list[str]:
        """The shards of which the device would say that they are lost."""
        return [shard for shard, count in self.shards.items() if count == LOST]

    def is_of(self, step: int) -> bool:
        """Whether everything is here, and of one step."""
        return self.own == step and set(self.shards.values()) == {step}

    def update(self) -> None:
        """The update is applied."""
        assert self._updates is not None
        self._updates = self.own = self._updates + 1
        self.shards = dict.fromkeys(self.shards, self._updates)
        self.gradients = None

    def tear(self) -> None:
        """The update ends halfway."""
        self.shards, self.gradients = dict.fromkeys(self.shards, TORN), None

    def lose(self) -> None:
        """What was here is lost."""
        self.shards, self.gradients = dict.fromkeys(self.shards, LOST), None

    def overwrite(self, shard: str) -> None:
        """A shard begins to arrive in the place of what was held: until all has come it is worth nothing."""
        self.shards[shard] = ARRIVING

    def load(self, step: int) -> None:
        """Read a checkpoint."""
        self.shards, self._updates = dict.fromkeys(self.shards, step), None

    def restored(self, step: int) -> None:
        """Repair and rollback are over."""
        self._updates, self.gradients = step, None


class Disk:
    """The checkpoint directory. `steps`: of the checkpoints that are complete and whole."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self._parts: dict[tuple[int, int], set[Part]] = {}  # (generation, step) -> what was written so far
        self.failures = 0  # how many could not be written, or not be made complete
        self.ever = False  # whether a checkpoint has been complete, whatever became of it
        self.damaged = False  # whether something was done to those that were
        self.unlisted = False  # whether the directory cannot be listed

    def complete(self, step: int) -> None:
        """A checkpoint has got its name."""
        self.steps.add(step)
        self.ever = True

    def damage(self, steps: Iterable[int]) -> None:
        """Damage checkpoints: it is seen before they are loaded, and they are passed over."""
        self.steps.difference_update(tuple(steps))
        self.damaged = True

    def survey(self) -> tuple[tuple[int, ...], CheckpointTrace]:
        """Return what a process finds in the directory."""
        if self.unlisted:
            return (), CheckpointTrace(DIRECTORY, unlisted="input/output error")
        unusable = "damaged" if self.ever and not self.steps else ""
        return tuple(sorted(self.steps)), CheckpointTrace(DIRECTORY, unusable=unusable)

    def write(self, process: "Process", order: SaveCheckpoint) -> str:
        """Write what a rank was told to, and every rank-local state of the step that it has; return what went wrong.

        The checkpoint is complete only when everything is in it.
        """
        world, held = process.world, process.memory.shards
        wrong = {shard: held.get(shard) for shard in order.shards if held.get(shard) != order.step}
        if wrong:
            what = f"rank {process.rank} writes {wrong} into a checkpoint of step {order.step}"
            world.fail(Invariant.SAME_NUMBERS, what)
        parts = self._parts.setdefault((order.generation, order.step), set())
        parts.update(order.shards)
        parts.update(copy.rank for copy in process.place.copies() if copy.step == order.step)
        if not order.publish:
            return ""
        ranks = range(process.world_size)
        missing = sorted(set(ranks) - parts)  # the rank-local states are what a process looks for before it publishes
        if missing:
            self.failures += 1
            return f"the checkpoint lacks the rank-local states of ranks {missing}"
        lost = {shard for rank in ranks for shard in world.shards(rank, len(ranks))} - parts
        if lost:
            what = f"rank {process.rank} publishes a checkpoint of step {order.step} without {sorted(lost)}"
            world.fail(Invariant.NOTHING_LOST, what)
        self.complete(order.step)
        return ""
