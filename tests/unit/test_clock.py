"""A job's clock is one for all of its controllers, whatever the wall clocks of their machines say."""

import time

import pytest

from midstep.controller import clock
from midstep.controller.clock import Clock, ClockReading, HeardClock

HOUR_S = 3600.0
WALL_S = 1_000_000.0
ELSEWHERE = "another machine"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is up for 100 s."""
    monkeypatch.setattr(time, "time", lambda: WALL_S)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(clock, "_boot", lambda: "here")


def test_the_first_controller_begins_at_its_wall_clock() -> None:
    assert Clock.continuing(None).now() == WALL_S


def test_on_the_same_machine_it_continues_exactly_whatever_the_wall_clock_says_by_now() -> None:
    last = ClockReading("here", 40.0, WALL_S - HOUR_S)
    assert Clock.continuing(last, HeardClock(WALL_S, 100.0, 0.0)).now() == WALL_S - HOUR_S + 60.0


@pytest.mark.parametrize("monotonic_s", [40.0, 400.0])
def test_on_another_machine_it_is_not_behind_the_last_one(monotonic_s: float) -> None:
    assert Clock.continuing(ClockReading(ELSEWHERE, monotonic_s, WALL_S + HOUR_S)).now() == WALL_S + HOUR_S
    assert Clock.continuing(ClockReading(ELSEWHERE, monotonic_s, WALL_S - HOUR_S)).now() == WALL_S


def test_after_another_boot_of_the_machine_its_monotonic_clock_says_nothing() -> None:
    assert Clock.continuing(ClockReading("here", 400.0, WALL_S + HOUR_S)).now() == WALL_S + HOUR_S


@pytest.mark.parametrize(
    ("told_ago_s", "expected_s"),
    [
        (HOUR_S, WALL_S - HOUR_S + 12.0),  # its own wall clock is an hour ahead
        (-HOUR_S, WALL_S + HOUR_S + 10.0),  # or behind
        (11.0, WALL_S),  # or right
    ],
)
def test_who_heard_the_leaders_clock_trusts_its_own_no_further_than_that_leaves_open(
    told_ago_s: float, expected_s: float
) -> None:
    """It was told between 12 and 10 s ago."""
    heard = HeardClock(WALL_S - told_ago_s, 90.0, 2.0)
    assert Clock.continuing(ClockReading(ELSEWHERE, 1.0, WALL_S - 10 * HOUR_S), heard).now() == expected_s


def test_what_was_heard_takes_no_clock_behind_the_one_before() -> None:
    heard = HeardClock(WALL_S - HOUR_S, 90.0, 2.0)
    assert Clock.continuing(ClockReading(ELSEWHERE, 1.0, WALL_S + 5.0), heard).now() == WALL_S + 5.0
