"""A rank's own time of a step is what it did not wait for others or for input."""

import threading
from collections.abc import Iterator

import pytest

from midstep.processor.injection_points import InjectionPoints
from midstep.processor.own_time import OwnTime
from midstep.processor.step_clock import StepClock
from midstep.protocol.blackbox import BlackBox
from midstep.protocol.types import Activity, StepTimes


def step(own: OwnTime, *, at_s: float = 0.0, cpu_s: float = 0.0) -> StepTimes:
    """The end of a step: a second in the commit barrier, half a one of update."""
    own.doing(Activity.COMMITTING, at_s, cpu_s)
    own.doing(Activity.UPDATING, at_s + 1.0, cpu_s)
    return own.end(at_s + 1.5, cpu_s + 0.5)


def test_what_is_waited_for_in_collectives_and_in_the_barrier_is_not_a_ranks_own() -> None:
    own = OwnTime()
    own.begin(10.0)
    own.entered(12.0, 2.0)
    own.waited(3.0, 15.0, 2.0)
    assert step(own, at_s=16.0) == StepTimes(1, 3_500_000, 0, 4_000_000)


def test_a_wait_in_another_language_is_known_by_the_processor_time_that_was_not_used() -> None:
    """The last bucket begins at 14, is over at 17, and the train thread goes on at 17, without having computed."""
    own = OwnTime()
    own.begin(10.0)
    own.entered(14.0, 4.0)
    own.ended_beside(17.0)
    assert step(own, at_s=17.0, cpu_s=4.0).wait_us == 4_000_000


def test_a_bucket_that_ends_while_the_backward_pass_goes_on_is_no_wait() -> None:
    own = OwnTime()
    own.begin(10.0)
    own.entered(12.0, 2.0)
    own.ended_beside(14.0)
    own.entered(16.0, 6.0)
    own.ended_beside(16.0)
    assert step(own, at_s=16.0, cpu_s=6.0) == StepTimes(1, 6_500_000, 0, 1_000_000)


def test_input_and_pauses_are_not_a_ranks_own() -> None:
    """Nor is what is waited for between two steps."""
    own = OwnTime()
    own.loaded(2.0)
    own.begin(10.0)
    own.loaded(1.0)
    own.doing(Activity.PAUSED, 13.0, 3.0)
    own.doing(Activity.COMPUTING, 23.0, 13.0)
    assert step(own, at_s=24.0) == StepTimes(1, 3_500_000, 3_000_000, 1_000_000)


def test_what_lies_between_two_steps_is_not_counted() -> None:
    """A rank that writes the log of all is not slow."""
    own = OwnTime()
    own.begin(0.0)
    step(own, at_s=1.0)
    own.doing(Activity.CHECKPOINTING, 3.0, 0.0)
    own.doing(Activity.COMPUTING, 9.0, 0.0)
    own.begin(20.0)
    assert step(own, at_s=21.0) == StepTimes(2, 3_000_000, 0, 2_000_000)


def test_tokens_that_are_no_number_are_not_counted() -> None:
    own = OwnTime()
    for tokens in (5.0, float("nan"), float("inf"), -3.0):
        own.counted(tokens)
    own.begin(0.0)
    assert step(own).tokens == 5


@pytest.fixture
def box() -> Iterator[BlackBox]:
    """A black box of rank 2."""
    made = BlackBox.create(2, 64)
    yield made
    made.close()


def test_the_agent_sees_the_times_of_the_steps_that_are_committed(box: BlackBox) -> None:
    """And those of the process before this one no more."""
    clock = StepClock(box, InjectionPoints(2, 1), 1)
    clock.of_stage(3)
    assert read(box) is None
    clock.begin_step(0, 0.0)
    clock.committed(1, 0.1)
    seen = read(box)
    assert seen is not None
    assert (seen.steps, seen.stage) == (1, 3)
    StepClock(box, InjectionPoints(2, 2), 2)
    assert read(box) is None


def test_what_another_thread_waits_for_is_not_the_train_threads_wait(box: BlackBox) -> None:
    clock = StepClock(box, InjectionPoints(2, 1), 1)
    clock.begin_step(0, 0.0)
    beside = threading.Thread(target=clock.waited, args=(5.0,))
    beside.start()
    beside.join()
    with clock.loading(), clock.loading():
        pass
    clock.committed(1, 0.1)
    seen = read(box)
    assert seen is not None
    assert seen.wait_us < 1_000_000


def read(box: BlackBox) -> StepTimes | None:
    """What the agent reads."""
    progress = box.read_progress(0.0)
    assert progress is not None
    return progress.times
