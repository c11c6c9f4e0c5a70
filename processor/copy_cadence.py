"""At which steps all ranks copy their state into host memory, and which of a rank's two files is written: pure.

Each rank has two files. A copy is taken by all ranks at the same step or by none: with every commit barrier a rank says
whether it is for a copy after this step, and the barrier tells all of them whether all were. A rank is for it when one
is due and its last one is whole. So when the first rank begins to overwrite its older copy, every rank has a whole one
of the step in between; from the first copy on there is always a step of which all ranks have one.

After a recovery the ranks may hold copies of different steps: one was lost in the middle of its copy, say. The plan
names the newest step of which all have one, and each rank drops whatever else it has before it trains on.

Some copies are written to disk as checkpoints: the first one at or after each so many steps. One is due then, too.
As all ranks take the same copies, all know of each whether it is one of those.

With `auto` the ranks need not agree on a number of steps: each is for a copy when its own costs allow it, and so the
copies are as far apart as the slowest rank needs. A rank that cannot copy at all is never for one.
"""

import math
from collections import deque
from collections.abc import Sequence

from ..protocol.errors import HostCopyError
from ..protocol.host_copies import FILES, Disk

MOST_OF_A_STEP = 0.005  # that `auto` lets the training wait for copies
_MEASURED = 4  # copies; the quickest of them counts, as the others were held up


class CopyCadence:
    """One rank's view of the copies that all take. Steps are counts of updates."""

    def __init__(self, every_steps: int, checkpoint_steps: int = 0) -> None:
        """`every_steps`: 0: as often as hardly costs anything.

        `checkpoint_steps`: from one that goes to disk to the next; 0: none does.
        """
        self._every_steps = every_steps
        self._checkpoint_steps = checkpoint_steps
        self._since = 0  # the step of the last copy, or at which all ranks stood: the same on all
        self._last = 0  # the step of the last copy that was taken or kept; 0: none
        self._whole = True
        self._costs: deque[tuple[float, float]] = deque(maxlen=_MEASURED)  # seconds waited for, and in all
        self._step_s = 0.0

    @property
    def every_steps(self) -> int:
        """How many steps are from one copy to the next; 1 before the first was measured."""
        if self._every_steps or not self._costs or self._step_s <= 0:
            return max(1, self._every_steps)
        waited_s = min(waited_s for waited_s, _ in self._costs)
        took_s = min(took_s for _, took_s in self._costs)
        return max(1, math.ceil(max(waited_s / MOST_OF_A_STEP, took_s) / self._step_s))

    def resumed(self, common: int, since: int = 0) -> None:
        """Go on from a recovery after which all ranks have a copy of this step; 0: of no step.

        `since`: the step of a copy that all have, or else that at which all stand.
        """
        self._last, self._whole, self._since = common, True, since

    def due(self, step: int) -> bool:
        """Return whether a copy is due after the update that makes `step`. At once where there is none."""
        return not self._last or step - self._last >= self.every_steps or self.goes_to_disk(step)

    def goes_to_disk(self, step: int) -> bool:
        """Return whether a copy of `step` is written to disk as a checkpoint."""
        every = self._checkpoint_steps
        return every > 0 and step // every > self._since // every

    def has_failed(self, step: int) -> bool:
        """Return whether checkpoints are written without copies at `step`: for twice their distance none was taken."""
        return step - self._since >= 2 * self._checkpoint_steps

    def agrees(self, step: int) -> bool:
        """Return whether this rank is for a copy after that update."""
        return self._whole and self.due(step)

    def began(self, step: int) -> None:
        """Note that the copy of `step` is being taken, as all ranks are for it."""
        self._last, self._since, self._whole = step, step, False

    def became_whole(self, *, waited_s: float, took_s: float, step_s: float) -> None:
        """Note that it is whole; for how long the training has waited for it, and what it took in all."""
        self._whole = True
        self._step_s = step_s
        self._costs.append((waited_s, took_s))


def stays(step: int, disk: Disk, common: int, *, goes_back: bool = False) -> bool:
    """Return whether a copy stays in a recovery: that of the step of which all have one, or one that goes to disk.

    Not if it is newer than the common one: that would be the older of two then, and the next to be written over.
    `goes_back`: where a vote is lost ranks go back to a state that has passed one. The common copy may have passed none
    yet, so the one before it stays until the vote of the next step, which comes before the next copy.
    """
    return step == common or (disk is Disk.WANTED and step < common) or (goes_back and 0 < step < common)


def may_be_written(disk: Disk) -> bool:
    """Return whether another copy may be written over one that is so far on its way to the disk."""
    return disk not in {Disk.PLANNED, Disk.WANTED}


def check_room(size_bytes: int, *, most_bytes: int, ranks: int, nodes: int = 1) -> None:
    """Raise HostCopyError if copies of this size are more than this rank's share of what a node may give to all.

    `nodes`: on how many each copy is, so for how many ranks each rank has files.
    """
    files = nodes * FILES
    allowed = most_bytes // ranks // files
    if size_bytes > allowed:
        raise HostCopyError(
            f"a copy takes {size_bytes / 1e6:.1f} MB, and {allowed / 1e6:.1f} MB are allowed for each of the {files} "
            f"copies of {ranks} ranks; raise host_copy.memory_bytes"
        )


def file_to_write(steps: Sequence[int], agreed: int | None = None) -> int:
    """Return which file is written next, of files with copies of these steps, 0 being none: never the newest one.

    `agreed`: the newest state that passed a vote of the ranks, where they vote. The newest copy of such a state stays
    then, whatever is newer: it is what all go back to if the next vote is lost.
    """
    kept = 0 if agreed is None else max((step for step in steps if step <= agreed), default=0)
    return min((index for index, step in enumerate(steps) if not kept or step != kept), key=steps.__getitem__)
