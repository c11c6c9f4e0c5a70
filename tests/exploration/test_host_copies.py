"""Every order in which few ranks copy, finish, write to disk, are lost and come back: a common copy is always there.

The ranks go by the product's own rules (`processor/copy_cadence.py`). Files outlive processes; a copy that was not
whole when its process was lost is torn. The commit barrier tells all at once; what follows it happens to each rank by
itself.
"""

import copy
from collections.abc import Iterator

import pytest

from midstep.processor.copy_cadence import CopyCadence, file_to_write, may_be_written, stays
from midstep.protocol.host_copies import Disk

from ..mutants.mutant import Mutant, applied

CADENCE = "midstep.processor.copy_cadence"
LOSSES = 2
STEPS = 6


class Broken(AssertionError):
    """A rule does not hold."""


class Rank:
    """The files of a rank, which outlive its process, and what its process knows."""

    def __init__(self, every_steps: int, checkpoint_steps: int) -> None:
        self.every = every_steps, checkpoint_steps
        self.files, self.disk = [0, 0], [Disk.NO, Disk.NO]
        self.cadence = CopyCadence(*self.every)
        self.under_way: int | None = None  # the file
        self.writing = 0  # the step of that
        self.agreed = False

    def agrees(self, step: int) -> bool:
        """Say at the commit barrier whether this rank is for a copy after it."""
        if self.under_way is None and self.writing:
            self.cadence.became_whole(waited_s=0.0, took_s=0.0, step_s=1.0)
            self.writing = 0
        return self.cadence.agrees(step) and may_be_written(self.disk[file_to_write(self.files)])

    def begin(self, step: int) -> None:
        """Begin a copy."""
        to_disk = self.cadence.goes_to_disk(step)
        self.cadence.began(step)
        self.under_way, self.writing, self.agreed = file_to_write(self.files), step, False
        if self.disk[self.under_way] is Disk.WANTED:
            raise Broken(f"a copy is begun over that of step {self.files[self.under_way]}, which is being written")
        self.files[self.under_way], self.disk[self.under_way] = 0, Disk.PLANNED if to_disk else Disk.NO

    def finish(self) -> None:
        """Complete it."""
        if self.under_way is not None:
            self.files[self.under_way], self.under_way = self.writing, None

    def resume(self, common: int, target: int, *, lost: bool) -> None:
        """Go on after a recovery."""
        self.cadence = CopyCadence(*self.every) if lost else self.cadence
        self.under_way, self.writing, self.agreed = None, 0, False
        for index, step in enumerate(self.files):
            if not stays(step, self.disk[index], common) or not step:
                self.files[index], self.disk[index] = 0, Disk.NO  # nothing is said of a torn copy
        self.cadence.resumed(common, common or target)

    def key(self) -> tuple[object, ...]:
        """What tells states apart."""
        known = self.cadence
        cadence = (known._last, known._whole, known._since)
        return (*self.files, *self.disk, self.under_way, self.writing, self.agreed, *cadence)


class World:
    """Ranks that are about to do a step together."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks, self.step, self.losses, self.had = ranks, 0, 0, 0

    def common(self) -> int:
        """The newest step of which all have a whole copy."""
        return max(set.intersection(*({*rank.files} for rank in self.ranks)), default=0)

    def moves(self) -> Iterator[tuple[str, int]]:
        """Yield everything that can happen next."""
        if self.step < STEPS and not any(rank.agreed for rank in self.ranks):
            yield "step", 0
        for number, rank in enumerate(self.ranks):
            if rank.agreed:
                yield "begin", number
            if rank.under_way is not None:
                yield "finish", number
            if Disk.WANTED in rank.disk:
                yield "over", number
            if self.losses < LOSSES:
                yield "lost with its state", number
                yield "lost, and others hold the same", number

    def make(self, move: str, number: int) -> None:
        """Have it happen."""
        rank = self.ranks[number]
        match move:
            case "step":
                votes = [each.agrees(self.step + 1) for each in self.ranks]
                self.step += 1
                for each in self.ranks:
                    each.agreed = all(votes)
                    if Disk.PLANNED in each.disk and each.files[each.disk.index(Disk.PLANNED)]:
                        each.disk[each.disk.index(Disk.PLANNED)] = Disk.WANTED
            case "begin":
                rank.begin(self.step)
            case "finish":
                rank.finish()
            case "over":
                rank.disk[rank.disk.index(Disk.WANTED)] = Disk.OVER
            case _:
                self.losses += 1
                for each in self.ranks:
                    if each is not rank:
                        each.finish()
                common = self.common()
                self.step = self.step if move.endswith("same") else common
                for each in self.ranks:
                    each.resume(common, self.step, lost=each is rank)
        if self.had and not self.common():
            raise Broken(f"nothing lost: after {move!r} no step is left of which all have a copy")
        self.had = self.had or self.common()

    def settle(self) -> None:
        """Have everything come to its end that is under way; then a copy has to be possible."""
        for rank in self.ranks:
            if rank.agreed:
                rank.begin(self.step)
            rank.finish()
        for _ in range(2):
            self.make("step", 0)
            for rank in self.ranks:
                if rank.agreed:
                    rank.begin(self.step)
                rank.finish()
                rank.disk = [Disk.OVER if each is Disk.WANTED else each for each in rank.disk]
        if not all(rank.agrees(self.step + STEPS) for rank in self.ranks):
            raise Broken("nothing is under way, and no copy is taken any more")


def explored(ranks: int, every_steps: int, checkpoint_steps: int) -> int:
    """Visit all states; return how many there are. Raises Broken."""
    seen = set[tuple[object, ...]]()
    left = [World([Rank(every_steps, checkpoint_steps) for _ in range(ranks)])]
    while left:
        world = left.pop()
        key = (world.step, world.losses, bool(world.had), *(rank.key() for rank in world.ranks))
        if key in seen:
            continue
        seen.add(key)
        copy.deepcopy(world).settle()
        for move, number in world.moves():
            after = copy.deepcopy(world)
            after.make(move, number)
            left.append(after)
    return len(seen)


@pytest.mark.parametrize(("every_steps", "checkpoint_steps"), [(1, 0), (1, 2), (2, 3)])
def test_a_common_copy_is_always_there_and_copies_never_end(every_steps: int, checkpoint_steps: int) -> None:
    """Two ranks, and two losses of one or the other."""
    assert explored(2, every_steps, checkpoint_steps) > 100


@pytest.mark.parametrize(
    "broken",
    [
        Mutant("before it is whole", CADENCE, "return self._whole and self.due(step)", "return self.due(step)"),
        Mutant("over the newest", CADENCE, "return min((index", "return max((index"),
        Mutant("over what is written", CADENCE, "return disk not in {Disk.PLANNED, Disk.WANTED}", "return True"),
        Mutant("the common one goes", CADENCE, "return step == common or (", "return bool("),
        Mutant("what is written stays", CADENCE, "and step < common", "and step < common + 5"),
    ],
    ids=lambda broken: broken.name,
)
def test_a_break_of_the_rules_is_found(broken: Mutant) -> None:
    """In so small a world already."""
    with applied(broken), pytest.raises(Broken):
        explored(2, 1, 2)
