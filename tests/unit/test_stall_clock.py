"""A stall is a step that takes too long by the rank's own history, and never for another rank's reasons."""

import math

import msgspec
import pytest

from midstep.agent.heartbeat import Stall, StallClock
from midstep.protocol.types import Activity, RankProgress, StepTimes, first_step_s

MEDIAN_S = 0.2
LIMIT_S = 3 * MEDIAN_S + 1.0
FIRST_LIMIT_S = first_step_s(MEDIAN_S)


def clock() -> StallClock:
    return StallClock(factor=3.0, grace_s=1.0, after_steps=5)


def reading(step: int, age_s: float = 0.1, **changes: object) -> RankProgress:
    progress = RankProgress(
        rank=1,
        incarnation=0,
        generation=1,
        step=step,
        activity=Activity.COMPUTING,
        collectives=4,
        activity_age_s=age_s,
        step_age_s=age_s,
        median_step_s=MEDIAN_S,
    )
    return msgspec.structs.replace(progress, **changes)


def after(steps: int) -> StallClock:
    """A clock that has seen the rank do `steps` steps."""
    watched = clock()
    for step in range(steps + 1):
        assert watched.observe(reading(step)) is None
    return watched


def test_a_step_beyond_its_limit_is_reported_and_again_when_its_age_has_doubled() -> None:
    watched = after(10)

    assert watched.observe(reading(10, LIMIT_S - 0.01)) is None
    stall = watched.observe(reading(10, LIMIT_S + 0.01))
    assert stall is not None
    assert stall.age_s == pytest.approx(LIMIT_S + 0.01)
    assert stall.limit_s == pytest.approx(LIMIT_S)
    assert watched.observe(reading(10, 2 * LIMIT_S - 0.01)) is None
    assert watched.observe(reading(10, 2 * LIMIT_S + 0.01)) is not None
    assert watched.observe(reading(10, 4 * LIMIT_S - 0.01)) is None


def test_what_was_learned_takes_the_place_of_the_policys_limit() -> None:
    watched = after(10)
    assert watched.observe(reading(10, 0.59, allowed_s=0.6)) is None
    stall = watched.observe(reading(10, 0.61, allowed_s=0.6))
    assert stall is not None
    assert "where 0.60 s are allowed by the last steps, with a median of 0.200 s" in stall.detail


def test_a_rank_that_waits_is_allowed_what_the_one_it_waits_for_is() -> None:
    """A rank whose data loader is slow has the policy's limit, and the others here wait for it with good reason."""
    watched = after(10)
    waits, loads = reading(10, 1.4, allowed_s=0.6), reading(10, 1.4, rank=2, allowed_s=0.0)
    most_s = watched.most_allowed_s([waits, loads])
    assert most_s == pytest.approx(LIMIT_S)
    assert watched.observe(waits, most_s) is None
    assert watched.observe(waits, watched.most_allowed_s([waits])) is not None
    away = reading(10, rank=3, activity=Activity.RECOVERING)
    assert watched.most_allowed_s([waits, away]) == 0.6


def test_a_rank_that_goes_by_the_policy_goes_by_nothing_else() -> None:
    assert after(10).observe(reading(10, LIMIT_S + 0.01), 60.0) is not None


def test_the_next_reading_is_when_a_step_reaches_its_limit() -> None:
    watched = after(10)
    assert watched.soonest_s() == pytest.approx(LIMIT_S - 0.1)
    assert watched.soonest_s() == math.inf  # a rank that is not read any more
    watched.observe(reading(10, LIMIT_S - 0.03))
    watched.observe(reading(10, 60.0, rank=2, activity=Activity.PAUSED))
    assert watched.soonest_s() == pytest.approx(0.03)
    watched.observe(reading(10, LIMIT_S + 0.01))
    assert watched.soonest_s() < 0
    watched.observe(reading(10, LIMIT_S + 0.02))
    assert watched.soonest_s() == pytest.approx(LIMIT_S - 0.02)


def test_the_detail_names_activity_ages_and_suspension() -> None:
    progress = reading(10, 2.5, activity=Activity.COLLECTIVE, suspended=True)

    detail = Stall(progress=progress, age_s=2.5, limit_s=1.6).detail

    assert "step 10 has taken 2.50 s, where 1.60 s are allowed by a median of 0.200 s" in detail
    assert "collective for 2.50 s, 4 collectives entered" in detail
    assert "the process is stopped" in detail


def test_a_rest_is_reported_once_others_wait_and_again_when_it_has_doubled() -> None:
    watched = after(10)
    assert watched.observe(reading(10, 0.5, rest_s=0.4), is_felt=False) is None
    stall = watched.observe(reading(10, 0.6, rest_s=0.5))
    assert stall is not None
    assert "has done nothing at all for 0.50 s" in stall.detail
    assert "in step 10, which has taken 0.60 s; computing, 4 collectives entered" in stall.detail
    assert watched.observe(reading(10, 1.0, rest_s=0.9)) is None
    assert watched.observe(reading(10, 1.2, rest_s=1.1)) is not None
    assert watched.observe(reading(11)) is None
    assert watched.observe(reading(11, 0.6, rest_s=0.5)) is not None  # in the next step from the beginning


def test_a_rest_in_the_first_step_after_a_recovery_is_not_reported() -> None:
    watched = after(10)
    assert watched.observe(reading(10, generation=2, rest_s=0.5)) is None


def test_the_next_step_is_watched_again() -> None:
    watched = after(10)
    assert watched.observe(reading(10, 5.0)) is not None

    assert watched.observe(reading(11)) is None
    assert watched.observe(reading(11, 5.0)) is not None


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_short_history_is_not_believed(steps: int) -> None:
    assert after(steps).observe(reading(steps, 60.0)) is None


def test_a_rank_without_a_median_is_not_judged() -> None:
    assert after(10).observe(reading(10, 60.0, median_step_s=0.0)) is None


@pytest.mark.parametrize(
    "activity",
    [Activity.STARTING, Activity.CHECKPOINTING, Activity.PAUSED, Activity.RECOVERING, Activity.FINISHED],
)
def test_time_outside_of_the_step_proper_is_not_judged_nor_held_against_the_step_later(activity: Activity) -> None:
    watched = after(10)

    assert watched.observe(reading(10, 60.0, activity=activity)) is None
    assert watched.observe(reading(10, 61.0)) is None
    assert watched.observe(reading(10, 60.0 + LIMIT_S + 0.1)) is not None


@pytest.mark.parametrize("activity", [Activity.COMPUTING, Activity.COLLECTIVE, Activity.COMMITTING, Activity.UPDATING])
def test_every_part_of_the_step_proper_is_judged(activity: Activity) -> None:
    assert after(10).observe(reading(10, 5.0, activity=activity)) is not None


def test_an_observer_that_was_held_up_blames_nobody() -> None:
    watched = after(10)
    watched.held_up(30.0)

    assert watched.observe(reading(10, 30.0 + LIMIT_S - 0.1)) is None
    assert watched.observe(reading(10, 30.0 + LIMIT_S + 0.1)) is not None


def test_the_first_step_after_a_recovery_may_take_as_long_as_the_controller_waits_for_it() -> None:
    watched = after(10)
    assert watched.observe(reading(10, 0.5, generation=2, activity=Activity.RECOVERING)) is None

    assert watched.observe(reading(10, FIRST_LIMIT_S - 0.1, generation=2)) is None
    assert watched.observe(reading(11, 0.1, generation=2)) is None
    assert watched.observe(reading(11, 5.0, generation=2)) is not None


def test_a_step_that_hangs_before_the_first_reading_of_a_generation_is_found() -> None:
    """Some steps of a few milliseconds were done by then, so it is not the first one, which cannot be told."""
    watched = after(10)
    assert watched.observe(reading(13, 0.1, generation=2)) is None
    assert watched.observe(reading(13, FIRST_LIMIT_S - 0.1, generation=2)) is None
    stall = watched.observe(reading(13, FIRST_LIMIT_S + 0.1, generation=2))
    assert stall is not None
    assert stall.limit_s == pytest.approx(FIRST_LIMIT_S)


def test_steps_between_two_readings_are_history_too() -> None:
    """All of a short job's steps may lie between two readings: the process counts them itself."""
    times = StepTimes(9, 0, 0, 0)
    assert clock().observe(reading(9, FIRST_LIMIT_S + 0.1)) is None
    assert clock().observe(reading(9, FIRST_LIMIT_S + 0.1, times=times)) is not None


def test_a_newcomer_that_jumps_to_the_step_of_the_world_has_no_history_by_that() -> None:
    watched = clock()
    assert watched.observe(reading(0, incarnation=1, activity=Activity.STARTING)) is None
    assert watched.observe(reading(1000, incarnation=1, activity=Activity.RECOVERING)) is None

    for step in range(1000, 1005):
        assert watched.observe(reading(step, 60.0, incarnation=1)) is None
    assert watched.observe(reading(1005, 60.0, incarnation=1)) is not None


def test_a_new_incarnation_starts_without_history() -> None:
    watched = after(10)

    assert watched.observe(reading(11, 60.0, incarnation=1)) is None
    assert watched.observe(reading(12, 60.0, incarnation=1)) is None


def test_a_step_that_was_rolled_back_is_a_new_beginning() -> None:
    watched = after(10)

    assert watched.observe(reading(9, FIRST_LIMIT_S - 0.1)) is None
    assert watched.observe(reading(10, FIRST_LIMIT_S - 0.1)) is not None


def test_a_forgotten_rank_starts_without_history() -> None:
    watched = after(10)
    watched.forget(1)
    watched.forget(7)

    assert watched.observe(reading(10, 60.0)) is None


def test_ranks_are_judged_apart() -> None:
    watched = after(10)

    assert watched.observe(reading(10, 60.0, rank=2)) is None
    assert watched.observe(reading(10, 60.0)) is not None
