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

A copy costs what the training waits for it. Where no core is idle, copying makes the steps beside it longer as well,
though nothing waits. So those steps are compared with the ones before the copy, in which none was under way; with
`auto` there is always at least one. Step times vary for many reasons, and a copy can take no more from the training
than the processor time that it used: more is not counted.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..protocol.errors import HostCopyError
from ..protocol.host_copies import FILES, Disk

MOST_OF_A_STEP = 0.005  # that `auto` lets the training wait for copies
_MEASURED = 4  # copies; the quickest of them counts, as the others were held up
_LEAST_APART = 2  # steps, with `auto`, where they are noted: some are without a copy, to be compared with
_BEFORE = 8  # steps without a copy, with whose median those beside one are compared
_COMPARED, _LEAST_COMPARED = 5, 3  # copies, whose median counts: the steps beside one can be longer for other reasons


class _Cost(NamedTuple):
    """The seconds that a copy took: of the training, in all, and of processors."""

    waited_s: float
    took_s: float
    cpu_s: float


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
        self._costs: deque[_Cost] = deque(maxlen=_MEASURED)
        self._step_s = 0.0
        self._taken = 0
        self._over: tuple[int, float] | None = None  # the last step that was over, and when
        self._without: deque[float] = deque(maxlen=_BEFORE)  # what steps without a copy took
        self._longer_s: float | None = None  # by how much the steps beside the last copy were longer, so far
        self._longer: deque[float] = deque(maxlen=_COMPARED)
        self._apart = 1  # at least, with `auto`

    @property
    def every_steps(self) -> int:
        """How many steps are from one copy to the next; with `auto` as few as may be before the first was measured."""
        if self._every_steps:
            return self._every_steps
        if not self._costs or self._step_s <= 0:
            return self._apart
        waited_s = min(each.waited_s for each in self._costs)
        took_s = min(each.took_s for each in self._costs)
        return max(self._apart, math.ceil(max(waited_s / MOST_OF_A_STEP, took_s) / self._step_s))

    def resumed(self, common: int, since: int = 0) -> None:
        """Go on from a recovery after which all ranks have a copy of this step; 0: of no step.

        `since`: the step of a copy that all have, or else that at which all stand.
        """
        self._last, self._whole, self._since = common, True, since
        self._over = self._longer_s = None

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
        self._taken += 1
        self._longer_s = None

    def over(self, step: int, now: float, *, beside: bool) -> None:
        """Note that a step was over at `now`, in seconds; `beside`: a copy was under way in it."""
        self._apart = max(self._apart, _LEAST_APART)
        before, self._over = self._over, (step, now)
        if before is None or before[0] != step - 1:
            return
        took_s = now - before[1]
        if not beside:
            self._without.append(took_s)
        elif self._without:
            self._longer_s = (self._longer_s or 0.0) + took_s - statistics.median(self._without)

    def became_whole(self, *, waited_s: float, took_s: float, step_s: float, cpu_s: float = 0.0) -> None:
        """Note that it is whole; for how long the training has waited for it, and what it took in all.

        `cpu_s`: the processor time that it took, and so at most from the training.
        """
        self._whole = True
        self._step_s = step_s
        self._costs.append(_Cost(waited_s, took_s, cpu_s))
        if self._longer_s is not None and self._taken > FILES:  # the first copies get the memory of their files
            self._longer.append(self._longer_s)
        if len(self._longer) >= _LEAST_COMPARED and step_s > 0:
            most_s = min(each.cpu_s for each in self._costs)
            needed = math.ceil(min(statistics.median(self._longer), most_s) / (MOST_OF_A_STEP * step_s))
            self._apart = max(_LEAST_APART, needed, self._apart // 2)


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
