"""How long a step may take is learned from the steps before it, without an alarm for one that was only late."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from midstep.processor.step_limit import MARGIN, REMEMBERED_STEPS, SEEN_S, StepLimit, limit_after
from midstep.protocol.types import Activity

STEPS = 20_000
FACTOR, GRACE_S, AFTER_STEPS = 3.0, 1.0, 5
MARGIN_S = MARGIN * GRACE_S
RECORDED = sorted((Path(__file__).parent / "step_traces").glob("*.txt"))


class Rank:
    """A rank whose steps take as long as they are told to, and the time at which it is."""

    def __init__(self, **changes: float) -> None:
        chosen = {"factor": FACTOR, "grace_s": GRACE_S, "after_steps": AFTER_STEPS, **changes}
        self.limit = StepLimit(**chosen)  # type: ignore[arg-type]
        self.now = 100.0
        self.limit.doing(Activity.STARTING, self.now)
        self.limit.doing(Activity.RECOVERING, self.now)

    def step(self, took_s: float, *, median_s: float = 0.2) -> None:
        """Take a step, and begin the next one."""
        self.limit.begins(self.now)
        self.now += took_s
        self.limit.commits(self.now, median_s)

    def steps(self, count: int, took_s: float = 0.2) -> "Rank":
        for _ in range(count):
            self.step(took_s, median_s=took_s)
        return self

    def recover(self, behind_s: float = 0.0) -> None:
        """Be interrupted in a step, and resume."""
        self.limit.begins(self.now)
        self.now += behind_s
        self.limit.doing(Activity.RECOVERING, self.now)
        self.now += 0.5


def policys_s(median_s: float) -> float:
    return FACTOR * median_s + GRACE_S


# --- what is learned --------------------------------------------------------------------------------------------------


def test_the_limit_is_the_policys_at_first_and_shrinks_with_each_step_that_was_even() -> None:
    rank = Rank()
    assert rank.limit.allowed_s == 0.0
    rank.steps(1 + AFTER_STEPS)
    assert rank.limit.allowed_s == pytest.approx(policys_s(0.2))
    limits = []
    for _ in range(300):
        rank.step(0.2)
        limits.append(rank.limit.allowed_s)
    assert limits == sorted(limits, reverse=True)
    assert limits[0] < policys_s(0.2)
    assert 0.2 + MARGIN_S < limits[-1] < 0.2 + MARGIN_S + 0.03


@pytest.mark.parametrize(
    ("steps", "longest_s", "limit_s"),
    [
        (5, 0.2, 1.6),  # nothing learned
        (10, 0.2, 1.15),  # half of the way to where it settles
        (50, 0.2, 0.79),
        (10**9, 0.2, 0.7),
        (10**9, 0.1, 0.6),  # short steps: by the margin
        (10**9, 0.7, 1.4),  # long ones: by the factor
        (10**9, 0.9, 1.6),  # never above the policy's
        (10, 0.9, 1.6),
        (0, 0.2, 1.6),
    ],
)
def test_the_limit_follows_from_the_longest_step_and_how_many_there_were(
    steps: int, longest_s: float, limit_s: float
) -> None:
    found_s = limit_after(steps, longest_s, most_s=1.6, margin_s=MARGIN_S, after_steps=AFTER_STEPS)
    assert found_s == pytest.approx(limit_s)


def test_one_long_step_lengthens_the_limit_until_it_is_forgotten() -> None:
    rank = Rank().steps(2000)
    before_s = rank.limit.allowed_s
    rank.step(0.6)
    assert rank.limit.allowed_s == pytest.approx(1.2, rel=0.03)
    rank.steps(REMEMBERED_STEPS - 1)
    assert rank.limit.allowed_s == pytest.approx(1.2, rel=0.03)
    rank.steps(1)
    assert rank.limit.allowed_s == pytest.approx(before_s, rel=0.01)


def test_what_is_kept_is_bounded_by_the_lengths_and_not_by_the_steps() -> None:
    rank = Rank()
    for number in range(STEPS):
        rank.step(10.0 * math.exp(-number / 2000))  # each step is the shortest so far
    assert len(rank.limit._longest) < 500


def test_the_time_between_two_steps_is_learned_as_well() -> None:
    """A log that is written after an update is none of the step, and the clock runs."""
    rank = Rank().steps(100)
    rank.now += 0.7
    rank.step(0.2)
    assert rank.limit.allowed_s > 1.4


# --- what teaches nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activity", [Activity.RECOVERING, Activity.CHECKPOINTING])
def test_the_step_behind_a_recovery_or_a_checkpoint_has_the_policys_limit_and_teaches_nothing(
    activity: Activity,
) -> None:
    rank = Rank().steps(500)
    settled_s = rank.limit.allowed_s
    rank.limit.doing(activity, rank.now)
    rank.now += 3.0
    rank.limit.doing(Activity.COMPUTING, rank.now)
    assert rank.limit.allowed_s == 0.0
    rank.limit.begins(rank.now)
    assert rank.limit.allowed_s == 0.0
    rank.now += 1.4
    rank.limit.commits(rank.now, 0.2)
    assert rank.limit.allowed_s == pytest.approx(settled_s)


def test_a_pause_that_was_announced_is_no_part_of_the_step_and_a_short_one_is() -> None:
    """The agent may not have seen a short one."""
    for pause_s, learned_s in ((60.0, 0.2), (0.4, 0.6)):
        assert (pause_s > SEEN_S) == (learned_s == 0.2)
        rank = Rank().steps(1000)
        rank.limit.begins(rank.now)
        rank.limit.doing(Activity.PAUSED, rank.now)
        rank.now += pause_s
        rank.limit.doing(Activity.COMPUTING, rank.now)
        rank.now += 0.2
        rank.limit.commits(rank.now, 0.2)
        assert rank.limit.allowed_s == pytest.approx(max(2 * learned_s, learned_s + MARGIN_S), rel=0.04)


# --- a limit that was too short ---------------------------------------------------------------------------------------


def test_a_step_that_was_broken_off_at_its_limit_lengthens_the_limit_up_to_the_policys() -> None:
    """A pause that comes seldom costs a few needless recoveries at most: those that waited for it remember."""
    rank = Rank().steps(5000)
    limits = [rank.limit.allowed_s]
    while limits[-1] < policys_s(0.2):
        rank.recover(behind_s=limits[-1] + 0.05)
        rank.steps(2)
        limits.append(rank.limit.allowed_s)
        assert limits[-1] >= min(1.5 * limits[-2], policys_s(0.2))
    assert len(limits) <= 4


def test_what_a_lost_node_keeps_the_others_waiting_for_counts_no_more_than_the_limit() -> None:
    rank = Rank().steps(5000)
    allowed_s = rank.limit.allowed_s
    rank.recover(behind_s=15.0)
    rank.steps(2)
    assert rank.limit.allowed_s < 2.1 * allowed_s


def test_a_step_that_ended_soon_for_another_ranks_fault_changes_nothing() -> None:
    rank = Rank().steps(5000)
    allowed_s = rank.limit.allowed_s
    rank.recover(behind_s=0.1)
    rank.steps(2)
    assert rank.limit.allowed_s == pytest.approx(allowed_s, rel=0.001)


# --- 20,000 steps -----------------------------------------------------------------------------------------------------

Trace = Callable[[random.Random], Iterable[float]]


def even(chance: random.Random) -> Iterator[float]:
    while True:
        yield chance.gauss(0.3, 0.003)


def exponential_loader(chance: random.Random) -> Iterator[float]:
    """Data that come late by another time in each step."""
    while True:
        yield 0.02 + chance.expovariate(1 / 0.01)


def regular_loader(chance: random.Random) -> Iterator[float]:
    """A quarter of a second in one step of a hundred, where the next file is opened."""
    for step in range(1, 10**9):
        yield chance.gauss(0.03, 0.003) + (0.25 if step % 100 == 0 else 0.0)


def random_loader(chance: random.Random) -> Iterator[float]:
    while True:
        yield chance.gauss(0.03, 0.003) + (0.25 if chance.random() < 0.01 else 0.0)


def long_steps_with_a_loader(chance: random.Random) -> Iterator[float]:
    while True:
        yield chance.gauss(2.0, 0.05) + (1.5 if chance.random() < 0.005 else 0.0)


def busy_from_now_and_then(chance: random.Random) -> Iterator[float]:
    """Another program shares the cores for some minutes: steps take twice as long at once, and differ more."""
    while True:
        for _ in range(chance.randrange(200, 2000)):
            yield chance.gauss(0.4, 0.01)
        for _ in range(chance.randrange(50, 500)):
            yield 0.4 * chance.uniform(1.2, 1.95)


def long_tail(chance: random.Random) -> Iterator[float]:
    while True:
        yield 0.2 * chance.lognormvariate(0.0, 0.25)


def evaluation(chance: random.Random) -> Iterator[float]:
    """A rank evaluates for as long as a policy's limit allows, every 500 steps, and has not said so."""
    for step in range(1, 10**9):
        yield chance.gauss(0.5, 0.01) + (0.45 if step % 500 == 0 else 0.0)


TRACES: list[Trace] = [
    even, exponential_loader, regular_loader, random_loader, long_steps_with_a_loader, busy_from_now_and_then,
    long_tail, evaluation,
]  # fmt: skip


def alarms(steps: Iterable[float], count: int) -> tuple[int, float]:
    """Return how many of so many steps took longer than they were allowed to, and what is allowed at the end."""
    rank, found, last = Rank(), 0, [0.0]
    for step_s in steps:
        allowed_s = rank.limit.allowed_s or policys_s(last[len(last) // 2])
        found += len(last) > AFTER_STEPS and step_s > allowed_s
        last = sorted([*last[-30:], step_s]) if count % 97 == 0 or len(last) < 31 else last
        rank.step(step_s, median_s=last[len(last) // 2])
        count -= 1
        if not count:
            break
    return found, rank.limit.allowed_s


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
@pytest.mark.parametrize("seed", range(2))
def test_no_step_of_20000_that_is_only_late_is_an_alarm(trace: Trace, seed: int) -> None:
    found, _ = alarms(trace(random.Random(seed)), STEPS)
    assert found == 0


def test_even_steps_have_less_than_half_of_the_policys_limit_in_the_end() -> None:
    _, allowed_s = alarms(even(random.Random(1)), STEPS)
    assert allowed_s < policys_s(0.3) / 2


def test_a_policy_that_allows_less_has_a_smaller_margin() -> None:
    assert Rank(factor=2.0, grace_s=0.5).steps(STEPS).limit.allowed_s == pytest.approx(0.45, rel=0.03)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_steps_are_no_alarm(path: Path) -> None:
    """Steps of a real job, in milliseconds, in blocks that come in another order each time round."""
    recorded = [int(word) / 1000 for word in path.read_text().split()]
    blocks = [recorded[begin : begin + 200] for begin in range(0, len(recorded), 200)]
    chance = random.Random(3)

    def again() -> Iterator[float]:
        while True:
            yield from recorded
            for block in chance.sample(blocks, len(blocks)):
                yield from block

    found, _ = alarms(again(), STEPS)
    assert found == 0
