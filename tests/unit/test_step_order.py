"""The pure order of a step: what comes next, how a train function is left, and how far apart ranks can be."""

from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstep.processor.step_order import Act, Leave, StepOrder, StepState
from midstep.protocol.errors import Interrupted, ProtocolViolation
from midstep.protocol.types import CheckpointTrace, RepairPart, RestoreSource, ShardHold, ShardTransfer, StepReport

HOLDS = (ShardHold("a", 1), ShardHold("b", 1))


class Wishes:
    """What the controller wants."""

    def __init__(self) -> None:
        self.stop = False
        self.boundary: int | None = None

    def interrupted(self) -> bool:
        return self.stop

    def begins(self, step: int) -> bool:
        return step != self.boundary


class Rank:
    """One rank with its order and standing, at an act of its step's end or before it."""

    def __init__(self) -> None:
        self.wishes, self.step_state = Wishes(), StepState(clean=True)
        self.order = StepOrder(self.step_state, self.wishes)
        self.end: Generator[Act, bool, None] | None = None
        self.act: Act | None = None

    def to(self, act: Act) -> None:
        """Go on to an act, everything before it going well."""
        self.end = self.order.end(self.order.begin())
        self.act = next(self.end)
        while self.act is not act:
            self.answer(well=True)

    def answer(self, *, well: bool) -> None:
        """Say how the present act went; `act` is None when the update may begin."""
        assert self.end is not None
        try:
            self.act = self.end.send(well)
        except StopIteration:
            self.act = None

    def report(self) -> StepReport:
        """What it says at barrier one."""
        return self.step_state.report(HOLDS, (), (), CheckpointTrace())


@pytest.fixture
def rank() -> Rank:
    """A rank before its first step."""
    return Rank()


def test_the_end_of_a_step_has_one_order(rank: Rank) -> None:
    rank.to(Act.FINISH)
    seen = []
    while rank.act is not None:
        seen.append((rank.act, rank.step_state.ready, rank.step_state.updating))
        rank.answer(well=True)
    assert seen == [
        (Act.FINISH, False, False),
        (Act.CAPTURE, False, False),
        (Act.SWAP, True, False),
        (Act.MEET, True, False),
        (Act.PUBLISH, True, False),
    ]
    assert rank.step_state.updating
    assert rank.order.commit()
    assert (rank.step_state.count, rank.step_state.ready, rank.step_state.updating) == (1, False, False)


def test_who_does_not_get_its_wards_state_meets_nobody(rank: Rank) -> None:
    rank.to(Act.SWAP)
    rank.answer(well=False)
    assert rank.act is Act.HOLD
    assert rank.report().ready


def test_a_step_out_of_turn_is_a_violation(rank: Rank) -> None:
    with pytest.raises(ProtocolViolation, match=r"out of turn \(at 0\)"):
        next(rank.order.end(1))


def test_a_boundary_and_a_quiesce_keep_a_step_from_beginning(rank: Rank) -> None:
    rank.wishes.boundary = 0
    with pytest.raises(Interrupted):
        rank.order.begin()
    assert rank.order.at_boundary
    rank.wishes.boundary, rank.wishes.stop = None, True
    with pytest.raises(Interrupted):
        rank.order.begin()


def test_a_train_function_that_returns_has_finished_unless_orders_wait(rank: Rank) -> None:
    assert rank.order.leave(finished=True) is Leave.FINISHED
    rank.wishes.stop = True
    assert rank.order.leave(finished=True) is Leave.STOP


def test_what_was_ordered_at_the_broken_barrier_comes_next(rank: Rank) -> None:
    """Whether the update was finished for it or not."""
    for finish in (True, False):
        rank.order.rolled_back(0)
        rank.to(Act.MEET)
        rank.answer(well=False)
        if finish:
            rank.answer(well=True)
            assert not rank.order.commit()
        else:
            with pytest.raises(Interrupted):
                rank.answer(well=False)
        assert rank.order.leave(finished=False) is Leave.HELD


def test_an_update_that_raises_leaves_nothing_whole(rank: Rank) -> None:
    rank.to(Act.PUBLISH)
    rank.answer(well=True)
    assert rank.order.leave(finished=False) is Leave.STOP
    report = rank.report()
    assert (report.committed, report.ready, report.clean, report.holds) == (0, False, False, ())


def test_an_update_torn_at_a_broken_barrier_is_not_followed_by_the_order_that_asked_for_it(rank: Rank) -> None:
    """It counts on a whole update; rolled back over half of one, the rank would hand out what nobody ever had."""
    rank.to(Act.MEET)
    rank.answer(well=False)
    rank.answer(well=True)  # finish it
    assert rank.order.leave(finished=False) is Leave.STOP
    assert not rank.report().clean


def test_a_failure_of_its_own_after_a_finished_update_is_reported_before_anything_is_followed(rank: Rank) -> None:
    rank.to(Act.MEET)
    rank.answer(well=False)
    rank.answer(well=True)
    rank.order.commit()
    assert rank.order.leave(finished=False, failed=True) is Leave.STOP


def test_gradients_that_were_dropped_can_finish_no_update(rank: Rank) -> None:
    rank.to(Act.SWAP)
    rank.step_state.gradients_dropped()
    assert not rank.report().ready


def test_what_was_struck_is_not_held_and_takes_the_gradients_with_it(rank: Rank) -> None:
    rank.to(Act.SWAP)
    rank.step_state.mark_corrupted(["a"])
    assert rank.step_state.corrupted_since_report
    report = rank.report()
    assert not rank.step_state.corrupted_since_report
    assert (report.clean, report.ready, [hold.shard_id for hold in report.holds]) == (True, False, ["b"])
    rank.step_state.whole_again()
    assert rank.report().holds == HOLDS


@pytest.mark.parametrize(
    ("part", "clean", "held"),
    [
        (RepairPart(0, RestoreSource.REPLICA), True, ["a", "b"]),
        (RepairPart(0, RestoreSource.REPLICA, transfers=(ShardTransfer("a", 0, 1, 1, 0),)), True, ["b"]),
        (RepairPart(0, RestoreSource.REPLICA, transfers=(ShardTransfer("a", 0, 1, 0, 1),)), True, ["a", "b"]),
        (RepairPart(1, RestoreSource.REPLICA, transfers=(ShardTransfer("a", 0, 1, 1, 0),)), False, []),
        (RepairPart(0, RestoreSource.CHECKPOINT), False, []),
    ],
    ids=["nothing", "one shard of the same step", "as its source", "another step", "a checkpoint"],
)
def test_what_a_repair_overwrites_is_not_whole_meanwhile(part: RepairPart, clean: bool, held: list[str]) -> None:
    step_state = StepState(clean=True)
    step_state.repairing(part, rank=0)
    report = step_state.report(HOLDS, (), (), CheckpointTrace())
    assert (report.clean, [hold.shard_id for hold in report.holds]) == (clean, held)


@pytest.mark.parametrize(
    ("part", "clean", "held"),
    [
        (RepairPart(0, RestoreSource.REPLICA, transfers=(ShardTransfer("a", 0, 1, 1, 0),)), True, ["a", "b"]),
        (RepairPart(1, RestoreSource.REPLICA, transfers=(ShardTransfer("a", 0, 1, 1, 0),)), False, []),
    ],
    ids=["one shard of the same step", "another step"],
)
def test_a_struck_shard_that_has_come_is_there_though_the_rollback_is_not_over(
    part: RepairPart, clean: bool, held: list[str]
) -> None:
    """Its source may be lost in between: then this is the only copy."""
    step_state = StepState(clean=True)
    step_state.repairing(part, rank=0)
    step_state.repaired()
    report = step_state.report(HOLDS, (), (), CheckpointTrace())
    assert (report.clean, [hold.shard_id for hold in report.holds]) == (clean, held)


class Ranks:
    """Some ranks side by side. Swaps and meetings complete where all who are needed have come, or break."""

    def __init__(self, size: int) -> None:
        self.all = [Rank() for _ in range(size)]
        self._swapping: dict[int, set[int]] = {}  # step -> the ranks that have handed over their local state
        self._meeting: dict[int, set[int]] = {}
        self._broken = False  # from now on nobody begins a step

    def turn(self, who: int, *, well: bool) -> None:
        """Have one rank go on by one act, where it can."""
        each = self.all[who]
        step = each.step_state.count
        if each.step_state.updating:
            each.order.commit()
            each.end = each.act = None
        elif each.end is None:
            self._begin(each, who)
        elif each.act is Act.PUBLISH or (each.act in {Act.SWAP, Act.MEET} and (self._completes(each, who) or not well)):
            each.answer(well=well or each.act is Act.PUBLISH)
            self._broken = self._broken or not well
            if each.act is Act.MEET:
                self._meeting.setdefault(step, set()).add(who)

    def _begin(self, each: Rank, who: int) -> None:
        if not self._broken:
            each.to(Act.SWAP)
            self._swapping.setdefault(each.step_state.count, set()).add(who)

    def _completes(self, each: Rank, who: int) -> bool:
        size, step = len(self.all), each.step_state.count
        if each.act is Act.SWAP:
            return (who - 1) % size in self._swapping[step]
        return len(self._meeting[step]) == size


@given(size=st.integers(1, 4), turns=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80))
def test_who_has_not_committed_what_another_has_can_finish_it(size: int, turns: list[tuple[int, bool]]) -> None:
    """That is what the repair counts on, however ranks are interleaved, and wherever a barrier breaks for some only."""
    ranks = Ranks(size)
    for number, well in turns:
        ranks.turn(number % size, well=well)
    for each in ranks.all:
        if each.step_state.updating:  # who is in its update is let finish it
            each.order.commit()
    reports = [each.report() for each in ranks.all]
    newest = max(report.committed for report in reports)
    for report in reports:
        assert report.committed == newest or (report.committed == newest - 1 and report.ready)


def test_a_bracket_that_was_no_update_leaves_the_step_to_be_computed_on(rank: Rank) -> None:
    """It is at the same step as before, tears nothing when it is stopped, and its update may still come."""
    rank.to(Act.PUBLISH)
    rank.answer(well=True)
    assert rank.step_state.updating

    rank.order.void()

    assert (rank.step_state.count, rank.step_state.ready, rank.step_state.updating) == (0, False, False)
    rank.end = rank.order.end(0)
    rank.act = next(rank.end)
    while rank.act is not None:
        rank.answer(well=True)
    assert rank.order.commit()
    assert rank.step_state.count == 1
    rank.wishes.stop = True
    assert rank.order.leave(finished=False) is Leave.STOP
    assert rank.step_state.clean
