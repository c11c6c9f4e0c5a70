"""The step clock writes what the train thread does where its agent can read it."""

import time
from collections.abc import Iterator

import pytest

from midstep.processor.injection_points import InjectionPoints
from midstep.processor.step_clock import StepClock
from midstep.processor.step_limit import StepLimit
from midstep.protocol.blackbox import BlackBox
from midstep.protocol.errors import InjectedFault
from midstep.protocol.types import Activity, ArmedFault, FaultAction, InjectionPoint, RankProgress


@pytest.fixture
def box() -> Iterator[BlackBox]:
    """A black box of rank 2."""
    made = BlackBox.create(2, 64)
    yield made
    made.close()


def read(box: BlackBox) -> RankProgress:
    """What the agent sees."""
    progress = box.read_progress(time.monotonic())
    assert progress is not None
    return progress


def test_a_step_is_seen_with_its_generation_and_median(box: BlackBox) -> None:
    """The agent needs all of it to judge a stall."""
    clock = StepClock(box, InjectionPoints(2, 5), incarnation=5)
    clock.generation(3)
    clock.begin_step(7, 0.25)
    seen = read(box)
    assert (seen.rank, seen.incarnation, seen.generation, seen.step) == (2, 5, 3, 7)
    assert (seen.activity, seen.median_step_s) == (Activity.COMPUTING, 0.25)


def test_what_a_step_may_take_is_seen_and_not_while_input_is_waited_for(box: BlackBox) -> None:
    """A data loader is uneven by nature, so the policy's limit holds for it."""
    limit = StepLimit(factor=3.0, grace_s=1.0, after_steps=1)
    clock = StepClock(box, InjectionPoints(2, 1), incarnation=1, limit=limit)
    for step in range(20):
        clock.begin_step(step, 0.01)
        clock.committed(step + 1, 0.01)
    clock.begin_step(20, 0.01)
    allowed_s = read(box).allowed_s
    assert 0.5 < allowed_s < 0.7
    with clock.loading():
        assert read(box).allowed_s == 0.0
    assert read(box).allowed_s == allowed_s
    clock.doing(Activity.RECOVERING)
    clock.begin_step(20, 0.01)
    assert read(box).allowed_s == 0.0


def test_a_new_process_is_starting(box: BlackBox) -> None:
    """What a predecessor left in the box is overwritten at once."""
    StepClock(box, InjectionPoints(2, 1), incarnation=1).begin_step(9, 1.0)
    StepClock(box, InjectionPoints(2, 2), incarnation=2)
    seen = read(box)
    assert (seen.incarnation, seen.step, seen.activity) == (2, 0, Activity.STARTING)


def test_collectives_are_counted_and_left(box: BlackBox) -> None:
    """Inside one the activity is COLLECTIVE; behind the last it is what it was before."""
    clock = StepClock(box, InjectionPoints(2, 1), incarnation=1)
    clock.begin_step(0, 0.0)
    clock.entered("all_reduce")
    clock.entered("all_reduce")
    assert (read(box).collectives, read(box).activity) == (2, Activity.COLLECTIVE)
    clock.left("all_reduce")
    assert read(box).activity is Activity.COLLECTIVE
    clock.left("all_reduce")
    assert (read(box).collectives, read(box).activity) == (2, Activity.COMPUTING)


def test_a_generation_counts_from_the_start(box: BlackBox) -> None:
    """Survivors and newcomers compare."""
    clock = StepClock(box, InjectionPoints(2, 1), incarnation=1)
    clock.entered("barrier")
    clock.generation(2)
    clock.begin_step(1, 0.0)
    clock.entered("barrier")
    assert (read(box).generation, read(box).collectives) == (2, 1)


def test_a_collective_that_ends_after_its_generation_does_no_harm(box: BlackBox) -> None:
    """The count of those under way does not go below none."""
    clock = StepClock(box, InjectionPoints(2, 1), incarnation=1)
    clock.entered("barrier")
    clock.generation(2)
    clock.left("barrier")
    clock.entered("barrier")
    assert read(box).activity is Activity.COLLECTIVE


def test_a_fault_armed_for_a_collective_fires_before_it_counts(box: BlackBox) -> None:
    """So the others see that this rank has not entered."""
    clock = StepClock(
        box, InjectionPoints(2, 1, [ArmedFault(2, FaultAction.RAISE, InjectionPoint.COLLECTIVE, step=4)]), incarnation=1
    )
    clock.begin_step(4, 0.0)
    with pytest.raises(InjectedFault):
        clock.entered("all_reduce")
    assert read(box).collectives == 0


def test_without_a_black_box_the_injection_points_are_still_reached() -> None:
    """A script that nobody started under midstep runs through the same code."""
    clock = StepClock(
        None,
        InjectionPoints(0, 0, [ArmedFault(0, FaultAction.RAISE, InjectionPoint.COLLECTIVE, step=2)]),
        incarnation=0,
    )
    clock.begin_step(1, 0.5)
    clock.entered("barrier")
    clock.left("barrier")
    clock.doing(Activity.UPDATING)
    clock.committed(2, 0.5)
    with pytest.raises(InjectedFault):
        clock.entered("barrier")
