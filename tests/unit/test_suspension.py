"""A process that the kernel has stopped is reported after a grace, whatever it does."""

import msgspec
import pytest

from midstep.agent.heartbeat import SuspensionClock
from midstep.protocol.types import Activity, RankProgress

LIMIT_S = 3.0
READING = RankProgress(
    rank=1,
    incarnation=1,
    generation=1,
    step=0,
    activity=Activity.STARTING,
    collectives=0,
    activity_age_s=0.1,
    step_age_s=0.1,
    median_step_s=0.0,
    suspended=True,
)


def reading(**changes: object) -> RankProgress:
    return msgspec.structs.replace(READING, **changes)


def watched(now: float = 0.0) -> SuspensionClock:
    """A clock that has just seen rank 1 stopped."""
    clock = SuspensionClock(limit_s=LIMIT_S)
    assert clock.observe(READING, now) is None
    return clock


@pytest.mark.parametrize("activity", Activity)
def test_a_stopped_process_is_reported_after_the_limit_whatever_it_does(activity: Activity) -> None:
    clock = SuspensionClock(limit_s=LIMIT_S)

    assert clock.observe(reading(activity=activity), 10.0) is None
    assert clock.observe(reading(activity=activity), 10.0 + LIMIT_S - 0.01) is None
    suspension = clock.observe(reading(activity=activity), 10.0 + LIMIT_S)
    assert suspension is not None
    assert suspension.stopped_s == pytest.approx(LIMIT_S)
    assert f"stopped for 3.0 s by a signal or a debugger, while {activity} at step 0" in suspension.detail


def test_it_is_reported_again_when_its_time_has_doubled() -> None:
    clock = watched()

    reported = [second for second in range(1, 30) if clock.observe(READING, float(second)) is not None]
    assert reported == [3, 6, 12, 24]


def test_a_process_that_goes_on_in_time_starts_from_zero_the_next_time() -> None:
    clock = watched()

    assert clock.observe(reading(suspended=False), 2.0) is None
    assert clock.observe(READING, 2.1) is None
    assert clock.observe(READING, 5.0) is None
    assert clock.observe(READING, 5.2) is not None


def test_time_in_which_the_observer_was_held_up_does_not_count() -> None:
    clock = watched()
    clock.held_up(60.0)

    assert clock.observe(READING, 60.0 + LIMIT_S - 0.1) is None
    assert clock.observe(READING, 60.0 + LIMIT_S + 0.1) is not None


def test_a_stop_that_is_first_seen_after_the_observer_was_held_up_has_its_whole_grace() -> None:
    clock = SuspensionClock(limit_s=LIMIT_S)
    clock.held_up(60.0)

    assert clock.observe(READING, 60.0) is None
    assert clock.observe(READING, 60.0 + LIMIT_S - 0.1) is None


def test_a_new_process_of_the_rank_has_its_whole_grace() -> None:
    clock = watched()

    assert clock.observe(reading(incarnation=2), 2.9) is None
    assert clock.observe(reading(incarnation=2), 5.0) is None
    clock.forget(1)
    clock.forget(7)
    assert clock.observe(reading(incarnation=2), 6.0) is None


def test_a_traced_process_that_gets_on_is_not_reported() -> None:
    """Each look may find it at a system call that its tracer holds up."""
    clock = watched()

    assert clock.observe(reading(collectives=1), 2.0) is None
    assert clock.observe(reading(collectives=2), 4.0) is None
    assert clock.observe(reading(collectives=2, activity=Activity.COMPUTING), 6.0) is None
    assert clock.observe(reading(collectives=2, activity=Activity.COMPUTING), 6.0 + LIMIT_S) is not None


def test_ranks_are_watched_apart() -> None:
    clock = watched()

    assert clock.observe(reading(rank=2), 3.0) is None
    assert clock.observe(READING, 3.0) is not None
