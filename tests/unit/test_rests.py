"""How long a rank may do nothing at all is learned from its rests, without an alarm for one that was only longer."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from midstep.agent.rests import IDLE_SHARE, LEAST_SHARE, LOOK_AGAIN_S, LOOK_AGAIN_SHARE, RestClock, rest_after
from midstep.protocol.types import Activity, RankProgress

GRACE_S, AFTER_STEPS, TICK_S = 0.5, 5, 0.1
MARGIN_S = GRACE_S / 2
READING = RankProgress(
    rank=1,
    incarnation=1,
    generation=1,
    step=0,
    activity=Activity.COMPUTING,
    collectives=4,
    activity_age_s=0.0,
    step_age_s=0.0,
    median_step_s=0.2,
    allowed_s=0.9,
)


class Rank:
    """A rank as its agent sees it, the time at which it is, and what its process has used."""

    def __init__(self, clock: RestClock | None = None, rank: int = 1) -> None:
        self.clock = clock or RestClock(grace_s=GRACE_S, after_steps=AFTER_STEPS)
        self.reading = msgspec.structs.replace(READING, rank=rank)
        self.now, self.cpu_s = 100.0, 7.0

    def look(self, after_s: float = TICK_S, *, share: float = 0.0, waits: bool = True, **changes: object) -> float:
        """Be read after some time, of which the process has computed in a share."""
        self.now += after_s
        self.cpu_s += share * after_s
        self.reading = msgspec.structs.replace(self.reading, **changes)
        return self.clock.observe(self.reading, self.cpu_s, waits=waits, now=self.now)

    def steps(self, count: int, rest_s: float = 0.0) -> "Rank":
        """Do steps of two tenths of a second, in each of which there is a rest."""
        for _ in range(count):
            assert self.look(share=1.0, waits=False, step=self.reading.step + 1) == 0.0
            assert self.rests(rest_s) is None
            self.look(share=1.0, waits=False)
        return self

    def rests(self, lasts_s: float) -> float | None:
        """Do nothing for so long; return how long that was when it was too long."""
        for _ in range(round(lasts_s / 0.01)):
            found_s = self.look(0.01)
            if found_s:
                return found_s
        return None


def allowed(steps: int, longest_s: float = 0.0) -> float:
    return rest_after(steps, longest_s, margin_s=MARGIN_S, after_steps=AFTER_STEPS)


# --- how long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "longest_s", "limit_s"),
    [
        (4, 0.0, math.inf),  # nothing is known
        (5, 0.0, 0.5),  # twice the margin
        (50, 0.0, 0.275),
        (10**9, 0.0, 0.25),
        (10**9, 0.2, 0.45),  # short rests: by the margin
        (10**9, 0.7, 1.4),  # long ones: twice
        (5, 0.7, 1.65),
    ],
)
def test_the_limit_follows_from_the_longest_rest_and_how_many_steps_there_were(
    steps: int, longest_s: float, limit_s: float
) -> None:
    assert allowed(steps, longest_s) == pytest.approx(limit_s)


def test_a_policy_that_waits_for_no_step_has_the_margin_from_the_first() -> None:
    assert rest_after(0, 0.0, margin_s=MARGIN_S, after_steps=0) == MARGIN_S


def test_a_rank_that_does_nothing_for_longer_than_ever_is_found() -> None:
    rank = Rank().steps(50)
    assert rank.rests(5.0) == pytest.approx(allowed(50), abs=0.02)


def test_it_is_not_before_there_are_steps_to_learn_from() -> None:
    assert Rank().steps(AFTER_STEPS - 1).rests(5.0) is None


def test_a_rest_of_a_small_part_of_a_step_is_none() -> None:
    """To do a step of a minute again costs more than to wait for some seconds."""
    rank = Rank().steps(50)
    rank.reading = msgspec.structs.replace(rank.reading, median_step_s=60.0)
    assert rank.rests(60 * LEAST_SHARE) is None
    assert rank.rests(2.0) is not None


def test_rests_are_learned_and_one_that_is_longer_takes_twice_as_long() -> None:
    rank = Rank().steps(50, rest_s=0.4)
    found_s = rank.rests(5.0)
    assert found_s is not None
    assert 0.8 < found_s < 1.2


def test_what_any_rank_here_does_is_allowed_to_all() -> None:
    """They run the same script."""
    clock = RestClock(grace_s=GRACE_S, after_steps=AFTER_STEPS)
    evaluates, other = Rank(clock, 0), Rank(clock, 1)
    other.steps(50)
    for _ in range(2):
        evaluates.steps(AFTER_STEPS)
        evaluates.reading = msgspec.structs.replace(evaluates.reading, step=evaluates.reading.step + 1)
        evaluates.rests(0.5)
    found_s = other.rests(5.0)
    assert found_s is not None
    assert found_s > 1.0


# --- what is no rest --------------------------------------------------------------------------------------------------


def test_a_process_that_computes_is_at_work_and_one_whose_library_looks_around_is_not() -> None:
    busy, idle = Rank().steps(50), Rank().steps(50)
    assert not any(busy.look(share=1.5 * IDLE_SHARE) for _ in range(100))
    assert any(idle.look(share=0.5 * IDLE_SHARE) for _ in range(100))


def test_a_moment_of_work_ends_a_long_rest() -> None:
    rank = Rank().steps(50)
    assert rank.look() == rank.look(share=0.0) == 0.0
    assert rank.look(60.0)
    assert rank.look(share=0.5) == 0.0


def test_what_waits_for_a_core_is_not_at_rest() -> None:
    """On a busy machine a process may get none for long."""
    rank = Rank().steps(50)
    assert not any(rank.look(waits=False) for _ in range(100))


def test_one_reading_in_which_it_wants_to_run_does_not_end_a_rest() -> None:
    """A loop that sleeps a tenth of a second at a time wakes up for a moment, over and over."""
    rank = Rank().steps(50)
    seen = [rank.look(0.05, waits=number % 3 > 0) for number in range(12)]
    assert any(seen)


@pytest.mark.parametrize(
    "changes",
    [
        {"activity": Activity.COLLECTIVE},
        {"activity": Activity.COMMITTING},
        {"activity": Activity.PAUSED},
        {"activity": Activity.CHECKPOINTING},
        {
            "allowed_s": 0.0
        },  # it waits for its data loader, or has just recovered, or the policy lets nothing be learned
    ],
)
def test_a_rank_that_waits_with_good_reason_is_not_judged(changes: dict[str, Any]) -> None:
    rank = Rank().steps(50)
    assert not any(rank.look(**changes) for _ in range(100))
    assert rank.rests(0.1) is None  # nothing of it counts afterwards


def test_it_rests_at_one_place() -> None:
    """One that goes from collective to collective without computing is no one that hangs."""
    rank = Rank().steps(50)
    assert not any(rank.look(collectives=rank.reading.collectives + number % 2) for number in range(100))


def test_a_process_of_which_the_kernel_says_nothing_is_not_judged() -> None:
    rank = Rank().steps(50)
    for number in range(100):
        assert rank.clock.observe(rank.reading, None, waits=True, now=rank.now + number) == 0.0


def test_time_in_which_the_agent_did_not_run_is_excused() -> None:
    rank = Rank().steps(50)
    assert not rank.look(share=1.0)
    rank.look()
    rank.clock.held_up(30.0)
    assert not rank.look(30.0 + TICK_S)
    assert rank.rests(5.0) is not None


# --- a limit that was too short ---------------------------------------------------------------------------------------


def test_what_a_rank_was_replaced_for_is_allowed_to_its_next_process_and_to_the_others_here() -> None:
    rank = Rank().steps(2000)
    other = Rank(rank.clock, 2).steps(2000)
    found = [rank.rests(5.0)]
    for life in range(2, 5):
        rank.look(incarnation=life, allowed_s=0.0)
        rank.look(allowed_s=0.9)
        rank.steps(AFTER_STEPS)
        found.append(rank.rests(60.0))
    lengths = [each for each in found if each is not None]
    assert len(lengths) == 4
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(lengths))
    rank.look(incarnation=5, allowed_s=0.0)
    assert other.rests(lengths[-1]) is None


# --- when to look -----------------------------------------------------------------------------------------------------


def test_the_next_reading_is_when_a_rest_becomes_too_long_and_its_threads_are_looked_at_once() -> None:
    rank, looks = Rank().steps(50), list[bool]()

    def confirmed(*, idle: bool) -> bool:
        def look() -> bool:
            looks.append(idle)
            return idle

        return rank.clock.confirmed(1, look)

    assert rank.clock.soonest_s(rank.now) == math.inf
    rank.look(share=1.0)
    rank.look()
    assert rank.clock.soonest_s(rank.now) == pytest.approx(allowed(50) - TICK_S, abs=0.01)
    assert rank.look(0.9)
    assert not confirmed(idle=False)
    again_s = LOOK_AGAIN_S + LOOK_AGAIN_SHARE * 1.0
    assert rank.clock.soonest_s(rank.now) == pytest.approx(again_s)
    rank.look(0.9 * again_s)
    assert not confirmed(idle=True)
    assert looks == [False]
    rank.look(0.2 * again_s)
    assert confirmed(idle=True)
    assert rank.look(5.0)
    assert confirmed(idle=False)
    assert rank.clock.soonest_s(rank.now) == math.inf
    assert looks == [False, True]
    rank.look(share=1.0)
    rank.look(5.0)
    assert not confirmed(idle=False)  # another rest


def test_a_rank_that_is_gone_from_here_keeps_no_reading_waiting() -> None:
    rank = Rank().steps(50)
    rank.look()
    rank.look()
    assert rank.clock.soonest_s(rank.now) < math.inf
    assert rank.clock.soonest_s(rank.now) == math.inf


# --- 20,000 steps -----------------------------------------------------------------------------------------------------

Rests = Callable[[random.Random], Iterator[float]]


def random_pauses(chance: random.Random) -> Iterator[float]:
    """A quarter of a second in one step of a hundred, asleep."""
    while True:
        yield 0.25 if chance.random() < 0.01 else 0.0


def regular_pauses(_: random.Random) -> Iterator[float]:
    for step in range(1, 10**9):
        yield 0.25 if step % 100 == 0 else 0.0


def late_data(chance: random.Random) -> Iterator[float]:
    while True:
        yield chance.expovariate(1 / 0.01)


def device(chance: random.Random) -> Iterator[float]:
    """Most of a step is a wait for the device."""
    while True:
        yield chance.gauss(0.4, 0.02)


def evaluation(chance: random.Random) -> Iterator[float]:
    """A helper evaluates for the rank in one step of 50, and nothing has said so."""
    for step in range(1, 10**9):
        yield 0.01 + (chance.uniform(0.1, 0.4) if step % 50 == 20 else 0.0)


@pytest.mark.parametrize("rests", [random_pauses, regular_pauses, late_data, device, evaluation])
@pytest.mark.parametrize("grace_s", [0.5, 1.0])
def test_no_rest_of_20000_steps_that_is_only_longer_is_an_alarm(rests: Rests, grace_s: float) -> None:
    """Seen by readings that come each tenth of a second, and by those that are due."""
    chance = random.Random(5)
    lengths = rests(chance)
    rank = Rank(RestClock(grace_s=grace_s, after_steps=AFTER_STEPS))
    next_s = 0.0  # to the next reading
    for step in range(20_000):
        for phase_s, share in ((0.03, 1.0), (next(lengths), 0.0)):
            left_s = phase_s
            while left_s > next_s:
                left_s -= next_s
                assert rank.look(next_s, share=share, waits=share == 0.0, step=step) == 0.0, step
                due_s = rank.clock.soonest_s(rank.now)
                next_s = min(TICK_S, max(0.01, due_s))
            next_s -= left_s
            rank.now += left_s
            rank.cpu_s += share * left_s
