"""When all ranks copy their state into host memory: there is always a step of which all have a whole copy."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstep.processor.copy_cadence import CopyCadence, file_to_write, stays
from midstep.protocol.host_copies import Disk


class Rank:
    """A rank with two files, of which one may be torn; its process may be lost, its files not."""

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps
        self.files = [0, 0]
        self.under_way: tuple[int, int] | None = None  # file and step
        self.cadence = CopyCadence(every_steps)

    def whole(self) -> set[int]:
        """The steps of which a whole copy is here."""
        return {step for step in self.files if step}

    def begin(self, step: int) -> None:
        """Begin a copy: what was in its file is gone."""
        self.cadence.began(step)
        file = file_to_write(self.files)
        self.files[file], self.under_way = 0, (file, step)

    def finish(self) -> None:
        """Complete it, if one is under way."""
        if self.under_way is not None:
            file, self.files[file] = self.under_way[0], self.under_way[1]
            self.under_way = None
            self.cadence.became_whole(waited_s=0.0, took_s=0.001, step_s=0.1)

    def resume(self, common: int, *, lost: bool) -> None:
        """Go on after a recovery; a lost process has left a torn file, a survivor has finished its copy."""
        self.under_way = None
        if lost:
            self.cadence = CopyCadence(self.every_steps)
        self.files = [step if step == common else 0 for step in self.files]
        self.cadence.resumed(common)


MOMENTS = st.lists(st.tuples(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.booleans()), max_size=40)


@settings(max_examples=300, deadline=None)
@given(every_steps=st.integers(1, 4), moments=MOMENTS)
def test_from_the_first_copy_on_there_is_always_a_step_of_which_all_have_one(
    every_steps: int, moments: list[tuple[set[int], set[int], bool]]
) -> None:
    """Whoever is slow with a copy, is lost in one, or has not heard at a broken barrier that all were for it."""
    ranks = [Rank(every_steps) for _ in range(4)]
    step, ever = 0, False

    def common() -> int:
        return max(set.intersection(*(rank.whole() for rank in ranks)), default=0)

    for quick, lost, deaf in moments:
        for number in quick:
            ranks[number].finish()
        agreed = all(rank.cadence.agrees(step + 1) for rank in ranks)
        step += 1
        if agreed:
            for number, rank in enumerate(ranks):
                if not (deaf and lost and number in quick):  # the barrier broke for these: they take none
                    rank.begin(step)
        if lost:
            for number in set(range(4)) - lost:
                ranks[number].finish()
            step = common() or step
            for number, rank in enumerate(ranks):
                rank.resume(common(), lost=number in lost)
        ever = ever or common() > 0
        assert not ever or common() > 0


def test_copies_are_as_far_apart_as_the_policy_says() -> None:
    """The first one is taken at once."""
    rank, taken = Rank(3), []
    for step in range(1, 12):
        rank.finish()
        if rank.cadence.agrees(step):
            rank.begin(step)
            taken.append(step)
    assert taken == [1, 4, 7, 10]


def test_nobody_is_for_a_copy_before_the_last_one_is_whole() -> None:
    """Also where one is due."""
    rank = Rank(1)
    rank.begin(1)
    assert not rank.cadence.agrees(2)
    rank.finish()
    assert rank.cadence.agrees(3)


def test_auto_keeps_the_wait_below_half_a_percent_and_the_copy_within_its_steps() -> None:
    """Whichever of the two asks for more; the quickest of the last copies counts."""
    waits, takes = CopyCadence(0), CopyCadence(0)
    for waited_s in (0.5, 0.01):
        waits.began(1)
        waits.became_whole(waited_s=waited_s, took_s=0.02, step_s=0.1)
    assert waits.every_steps == 20
    takes.became_whole(waited_s=0.0, took_s=0.35, step_s=0.1)
    assert takes.every_steps == 4


STEP_S = 0.45


def trained(cadence: CopyCadence, steps: Sequence[float], *, longer_s: float, cpu_s: float) -> list[int]:
    """Train steps that take so long without a copy, and longer beside one; return after which ones was a copy.

    A copy is whole within the step beside it, and nothing waits for it.
    """
    taken, now, beside = list[int](), 0.0, False
    for step, step_s in enumerate(steps, start=1):
        if taken and cadence.due(step):
            cadence.became_whole(waited_s=0.0, took_s=0.04, step_s=STEP_S, cpu_s=cpu_s)
        now += step_s + (longer_s if beside else 0.0)
        agrees = cadence.agrees(step)
        cadence.over(step, now, beside=beside)
        beside = agrees
        if agrees:
            cadence.began(step)
            taken.append(step)
    return taken


def test_auto_counts_by_how_much_steps_beside_a_copy_are_longer() -> None:
    """Where training and copying share cores nothing waits, and 36 ms of 450 are half a percent of 16 steps."""
    taken = trained(CopyCadence(0), [STEP_S] * 200, longer_s=0.036, cpu_s=0.036)
    assert taken[:5] == [1, 3, 5, 7, 9]  # the first two are not counted, as they get memory, and three are compared
    assert {later - earlier for earlier, later in itertools.pairwise(taken[5:])} == {16}


def test_auto_copies_every_other_step_where_a_copy_costs_nothing() -> None:
    """There is an idle core, and so the processor time of copying is not the training's."""
    taken = trained(CopyCadence(0), [STEP_S] * 40, longer_s=0.0, cpu_s=0.036)
    assert taken == list(range(1, 41, 2))


def test_steps_that_are_longer_for_other_reasons_count_as_no_more_than_the_processor_time_of_a_copy() -> None:
    """Where something else is at work on the machine all steps vary, those beside copies too."""
    chance = random.Random(1)
    steps = [STEP_S * chance.uniform(1, 3) for _ in range(400)]
    taken = trained(CopyCadence(0), steps, longer_s=0.3, cpu_s=0.036)
    assert max(later - earlier for earlier, later in itertools.pairwise(taken)) == 16


def test_copies_come_closer_by_half_at_most_from_one_to_the_next() -> None:
    """A few steps beside copies that were quick by chance prove little."""
    cadence, now = CopyCadence(0), 0.0
    found = []
    for copy in range(24):
        for step in (3 * copy + 1, 3 * copy + 2, 3 * copy + 3):
            beside = step == 3 * copy + 1
            now += STEP_S + (0.036 if beside and copy < 12 else 0.0)
            cadence.over(step, now, beside=beside and copy > 0)
        if copy:
            cadence.became_whole(waited_s=0.0, took_s=0.04, step_s=STEP_S, cpu_s=0.036)
            found.append(cadence.every_steps)
        cadence.began(3 * copy + 3)
    assert max(found) == 16
    after = found[len(found) - found[::-1].index(16) :]
    assert after[:4] == [8, 4, 2, 2]


def test_a_step_that_was_interrupted_is_not_compared() -> None:
    """Of the time from the last step before a recovery to the first one behind it most is no step."""
    cadence = CopyCadence(0)
    taken = trained(cadence, [STEP_S] * 40, longer_s=0.0, cpu_s=0.036)
    for _ in range(6):
        cadence.resumed(taken[-1], 40)
        cadence.over(41, 1000.0, beside=True)
        cadence.over(43, 2000.0, beside=True)
        cadence.became_whole(waited_s=0.0, took_s=0.04, step_s=STEP_S, cpu_s=0.036)
    assert cadence.every_steps == 2


def test_the_newest_copy_is_never_overwritten() -> None:
    """Nor one that is the only one."""
    assert [file_to_write(steps) for steps in ((0, 0), (3, 0), (3, 4), (5, 4))] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("steps", "agreed", "written"),
    [((0, 0), 0, 0), ((3, 0), 3, 1), ((3, 4), 3, 1), ((5, 4), 4, 0), ((3, 4), 4, 0), ((3, 4), 2, 0), ((3, 4), 9, 0)],
)
def test_where_ranks_vote_the_newest_copy_that_has_passed_one_stays(
    steps: tuple[int, int], agreed: int, written: int
) -> None:
    """Whatever is newer has no vote behind it yet, and is overwritten instead."""
    assert file_to_write(steps, agreed) == written


@pytest.mark.parametrize(
    ("taken", "written"),
    [
        (range(1, 31), [10, 20, 30]),  # each step has one
        ((1, 4, 8, 12, 16, 20, 24), [12, 20]),  # the first one at or after each tenth step
        ((7, 38, 39, 41), [38, 41]),  # none was possible for a while
    ],
)
def test_the_first_copy_at_or_after_each_so_many_steps_goes_to_disk(taken: Sequence[int], written: list[int]) -> None:
    """Also where copies are seldom, or late."""
    cadence, found = CopyCadence(1, 10), []
    for step in taken:
        found += [step] if cadence.goes_to_disk(step) else []
        cadence.began(step)
        cadence.became_whole(waited_s=0.0, took_s=0.0, step_s=0.1)
    assert found == written


def test_where_a_lost_vote_goes_back_the_copy_before_the_common_one_stays_in_a_recovery() -> None:
    """That may have passed no vote yet. What is newer than the common one goes in any case."""
    for goes_back in (False, True):
        kept = [stays(step, Disk.NO, 5, goes_back=goes_back) for step in (0, 3, 5, 6)]
        assert kept == [False, goes_back, True, False]


def test_a_copy_is_due_where_a_checkpoint_is() -> None:
    """Though the next one would come later."""
    cadence = CopyCadence(100, 10)
    cadence.resumed(4, since=4)
    assert [step for step in range(5, 15) if cadence.due(step)] == [10, 11, 12, 13, 14]


def test_what_went_to_disk_before_a_recovery_does_not_again() -> None:
    """All count from where they stand."""
    cadence = CopyCadence(1, 10)
    cadence.resumed(0, since=12)
    assert [step for step in range(13, 24) if cadence.goes_to_disk(step)] == [20, 21, 22, 23]
    assert not cadence.has_failed(31)
    assert cadence.has_failed(32)
