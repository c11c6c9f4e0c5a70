"""Which ranks are slow, by the times that heartbeats carry: seeded noise, loaders, stages, nodes, tokens."""

import random
from collections.abc import Callable, Mapping

import pytest

from midstep.controller.slow_ranks import Place, SlowRanks
from midstep.policies.schema import SlowAction, SlowPolicy
from midstep.protocol.messages import NodeHeartbeat
from midstep.protocol.types import Activity, Assertion, FaultKind, FaultReport, LinkUse, RankProgress, StepTimes

AT_ONCE = SlowPolicy(then=SlowAction.DRAIN, for_s=0.0)
STEPS_A_BEAT = 2
Spent = Callable[[int, int], tuple[float, float]]  # of a rank in a step: computed, and waited for input


class Played:
    """A job whose ranks wait for each other at each step."""

    def __init__(
        self, ranks: int, *, per_node: int = 1, stages: int = 1, known: bool = True, policy: SlowPolicy = AT_ONCE
    ) -> None:
        self.judge, self.policy = SlowRanks(), policy
        self.places = {rank: Place(f"node{rank // per_node}", 1) for rank in range(ranks)}
        self.stages = {rank: rank % stages if known else -1 for rank in range(ranks)}
        self.generation, self.now, self.step = 1, 100.0, 0
        self.sums = {rank: [0.0] * 5 for rank in range(ranks)}
        self.said: list[tuple[int, FaultReport]] = []
        self.standing: set[str] = set()

    def play(
        self,
        steps: int,
        spent: Spent,
        tokens: Callable[[int, int], int] = lambda rank, step: 0,
        places: Mapping[int, Place] | None = None,
        busy_s: Callable[[int, int], float] = lambda rank, step: 0.002,
    ) -> "Played":
        """Do so many steps, and hear of them as a controller does that knows the ranks to be at `places`."""
        for _ in range(steps):
            times = {rank: spent(rank, self.step) for rank in self.places}
            longest_s = max(map(sum, times.values())) + 0.001
            for rank, (own_s, input_s) in times.items():
                row = self.sums[rank]
                row[0] += own_s
                row[1] += input_s
                row[2] += longest_s - own_s - input_s
                row[3] += tokens(rank, self.step)
                row[4] += busy_s(rank, self.step)
            self.now += longest_s
            self.step += 1
            if self.step % STEPS_A_BEAT == 0:
                self.beat(places or self.places)
        return self

    def beat(self, places: Mapping[int, Place]) -> None:
        """All nodes say how far their ranks are."""
        for rank, place in self.places.items():
            own, late, wait, work, busy = (round(1e6 * each) for each in self.sums[rank])
            links = (LinkUse(f"m{rank}", f"m{(rank + 1) % len(self.places)}", busy, 1000 * self.step),)
            times = StepTimes(self.step, own, late, wait, work // 1_000_000, self.stages[rank])
            clock = RankProgress(
                rank,
                place.incarnation,
                self.generation,
                self.step,
                Activity.COMPUTING,
                0,
                0.0,
                0.0,
                0.1,
                times=times,
                links=links,
            )
            self.judge.take(NodeHeartbeat(place.node, self.now, (clock,)))
        for report in self.judge.judge(self.now, self.policy, places, self.generation, self.standing):
            self.said.append((self.step, report))
            change = self.standing.discard if report.assertion is Assertion.RECOVER else self.standing.add
            change(report.fault_id)

    @property
    def named(self) -> list[tuple[FaultKind, str | None]]:
        """What was said to be slow."""
        return [(report.kind, report.node) for _, report in self.said if report.assertion is Assertion.OCCUR]


def noisy(seed: int, slow: Mapping[int, float] = {}, since: int = 0, noise: float = 0.03) -> Spent:
    """Steps of 100 ms, with noise; some ranks are slower by a factor from one step on."""
    chance = random.Random(seed)

    def spent(rank: int, step: int) -> tuple[float, float]:
        factor = slow.get(rank, 1.0) if step >= since else 1.0
        return 0.1 * factor * chance.lognormvariate(0.0, noise), 0.0

    return spent


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slow_rank_is_named_within_20_steps_and_no_other(seed: int, ranks: int) -> None:
    slow = seed % ranks
    job = Played(ranks).play(60, noisy(seed, {slow: 1.5}, since=30))
    assert job.named == [(FaultKind.SLOW, f"node{slow}")]
    (step, report), *_ = job.said
    assert step <= 30 + 20
    assert f"rank {slow}" in report.detail
    assert "times as long as others with equal work" in report.detail
    assert report.scores == {slow: pytest.approx(1.5, rel=0.15)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.03, 0.3, 1.0])
def test_noise_is_not_called_slow(seed: int, noise: float) -> None:
    """Also where both cores are busy, and one step differs from the next by as much as it takes."""
    assert Played(4).play(5000, noisy(seed, noise=noise)).said == []


def test_a_rank_that_is_slow_from_the_start_is_named() -> None:
    assert Played(4).play(40, noisy(1, {2: 1.6})).named == [(FaultKind.SLOW, "node2")]


def test_a_whole_slow_node_is_named_once_with_all_of_its_ranks() -> None:
    job = Played(4, per_node=2).play(60, noisy(3, {2: 1.5, 3: 1.6}, since=20))
    assert job.named == [(FaultKind.SLOW, "node1")]
    assert "ranks 2, 3 are slow" in job.said[0][1].detail


def test_a_node_with_slow_links_is_named_within_20_steps_and_well_again_when_they_are() -> None:
    """Each rank sends to the next in a ring; what rank 2 sends and is sent is longer on its way for 60 steps."""

    def busy_s(rank: int, step: int) -> float:
        return 0.06 if rank in {1, 2} and 30 <= step < 90 else 0.002

    job = Played(4).play(200, noisy(3), busy_s=busy_s)
    (step, named), (_, well) = job.said
    assert (named.kind, named.node, named.assertion) == (FaultKind.SLOW_LINK, "node2", Assertion.OCCUR)
    assert step <= 30 + 20
    assert "data is on its way for 60 ms from m" in named.detail
    assert (well.node, well.assertion, well.fault_id) == ("node2", Assertion.RECOVER, named.fault_id)
    assert well.detail == "the links of rank 2 are as fast as others"


def test_a_link_that_is_slow_in_one_direction_alone_has_to_be_so_four_times_as_long() -> None:
    """A busy machine does that to a single link for some rounds, and a bad cable does it to both directions."""
    job = Played(4).play(200, noisy(3), busy_s=lambda rank, step: 0.06 if rank == 2 and 30 <= step < 60 else 0.002)
    assert job.said == []
    job = Played(4).play(200, noisy(3), busy_s=lambda rank, step: 0.06 if rank == 2 and step >= 30 else 0.002)
    ((step, named),) = job.said
    assert (named.kind, named.node) == (FaultKind.SLOW_LINK, "node2")
    assert 30 + 4 * 12 <= step <= 30 + 4 * 14


def test_acknowledgements_that_wait_for_another_one_are_no_slow_link() -> None:
    """The kernel lets them wait for 40 ms, here always on the same links: for most of these steps."""
    job = Played(4).play(1000, noisy(3), busy_s=lambda rank, step: 0.038 if rank in {1, 2} else 0.002)
    assert job.said == []


@pytest.mark.parametrize("seed", range(10))
def test_a_slow_link_is_named_within_20_steps_where_acknowledgements_wait_now_and_then(seed: int) -> None:
    """How uneven that makes the other links, by a factor, says nothing of one that is slow by more."""
    chance = random.Random(seed)

    def busy_s(rank: int, step: int) -> float:
        return chance.choice((0.002, 0.035)) + (0.1 if rank in {1, 2} and step >= 30 else 0.0)

    ((step, named),) = Played(4).play(60, noisy(seed), busy_s=busy_s).said
    assert (named.kind, named.node) == (FaultKind.SLOW_LINK, "node2")
    assert step <= 30 + 20


def test_that_a_link_has_become_slow_does_not_count_as_unevenness_of_all() -> None:
    """Soon after the start there is no other round to tell how uneven links are. It takes three rounds all the same."""
    job = Played(3).play(40, noisy(5), busy_s=lambda rank, step: 0.45 if rank in {1, 2} and step >= 10 else 0.03)
    ((step, named),) = job.said
    assert (named.kind, named.node) == (FaultKind.SLOW_LINK, "node2")
    assert step == 10 + 3 * 4


def test_links_that_are_slow_now_and_then_are_nothing() -> None:
    chance = random.Random(8)
    job = Played(4).play(5000, noisy(4), busy_s=lambda rank, step: 0.02 * chance.expovariate(1.0))
    assert job.said == []


def test_a_slow_loader_is_called_slow_input_and_no_slow_device() -> None:
    def spent(rank: int, step: int) -> tuple[float, float]:
        own_s, _ = base(rank, step)
        return own_s, 0.05 if rank == 1 and step > 20 else 0.001

    base = noisy(4)
    assert Played(4).play(60, spent).named == [(FaultKind.SLOW_INPUT, "node1")]


def test_a_loader_that_is_late_now_and_then_is_nothing() -> None:
    """A quarter of a second in one of a hundred steps, by the default policy."""
    chance = random.Random(5)

    def spent(rank: int, step: int) -> tuple[float, float]:
        return 0.02 * chance.lognormvariate(0.0, 0.2), 0.25 if chance.random() < 0.01 else chance.expovariate(200)

    assert Played(2, policy=SlowPolicy()).play(20_000, spent).said == []


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    """The last has a larger layer; one rank of the first becomes slow."""
    base = noisy(6, {0: 1.5}, since=40)

    def spent(rank: int, step: int) -> tuple[float, float]:
        own_s, _ = base(rank, step)
        return own_s * (1.8 if rank % 2 else 1.0), 0.0

    job = Played(8, stages=2).play(40, spent)
    assert job.said == []
    assert job.play(30, spent).named == [(FaultKind.SLOW, "node0")]


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_without_equals_is_held_against_its_own_history(known: bool) -> None:
    base = noisy(7, {1: 1.5}, since=60)

    def spent(rank: int, step: int) -> tuple[float, float]:
        return base(rank, step)[0] * (1 + rank), 0.0

    job = Played(3, stages=3, known=known).play(60, spent)
    assert job.said == []
    assert job.play(30, spent).named == [(FaultKind.SLOW, "node1")]


def test_all_that_become_slower_together_are_not_slow() -> None:
    """Longer sequences, say: nothing is wrong with any node."""
    job = Played(3, stages=3).play(60, noisy(8))
    assert job.play(100, noisy(8, dict.fromkeys(range(3), 2.0))).said == []


def test_who_has_more_tokens_may_take_longer() -> None:
    base = noisy(9)
    chance = random.Random(9)

    def spent(rank: int, step: int) -> tuple[float, float]:
        return base(rank, step)[0] * (2.0 if rank == 2 else 1.0), 0.0

    def tokens(rank: int, step: int) -> int:
        return round(1000 * (2.0 if rank == 2 else 1.0) * chance.uniform(0.99, 1.01))

    assert Played(4).play(100, spent, tokens).said == []
    assert Played(4).play(100, spent).named == [(FaultKind.SLOW, "node2")]


def test_a_short_burst_is_not_called_slow() -> None:
    """By the default policy it has to last."""
    base = noisy(10)

    def spent(rank: int, step: int) -> tuple[float, float]:
        return base(rank, step)[0] * (3.0 if rank == 0 and 50 <= step < 62 else 1.0), 0.0

    assert Played(4, policy=SlowPolicy()).play(200, spent).said == []


def test_what_does_not_make_the_step_longer_is_not_called_slow() -> None:
    """Ranks that wait for others most of the time: who computes for 2 ms instead of 1 holds up nobody."""

    def spent(rank: int, step: int) -> tuple[float, float]:
        return (0.002 if rank == 1 else 0.1 if rank == 0 else 0.001), 0.0

    job = Played(4)
    job.stages[0] = 1
    assert job.play(100, spent).said == []


def test_a_node_is_well_again_only_after_some_rounds_far_below_the_limit() -> None:
    job = Played(4).play(40, noisy(11, {1: 1.6}))
    assert job.named == [(FaultKind.SLOW, "node1")]
    job.play(100, noisy(11, {1: 1.25}))
    assert len(job.said) == 1
    job.play(60, noisy(11))
    assert [report.assertion for _, report in job.said] == [Assertion.OCCUR, Assertion.RECOVER]


def test_a_controller_that_takes_over_says_nothing_twice_and_knows_who_is_well_again() -> None:
    job = Played(4).play(40, noisy(12, {1: 1.6}))
    job.judge = SlowRanks()
    assert len(job.play(40, noisy(12, {1: 1.6})).said) == 1
    job.judge = SlowRanks()
    assert job.play(60, noisy(12)).said[-1][1].assertion is Assertion.RECOVER


def test_the_first_steps_after_a_recovery_do_not_count() -> None:
    """A new process is slow once; and what another one has taken is not its own."""
    job = Played(4).play(40, noisy(13))
    job.places[1] = Place("spare", 2)
    job.sums[1] = [0.0] * 5
    job.generation, before = 2, job.step
    base = noisy(13)

    def spent(rank: int, step: int) -> tuple[float, float]:
        return base(rank, step)[0] * (5.0 if rank == 1 and step < before + 4 else 1.0), 0.0

    job.step = 0
    for sums in job.sums.values():
        sums[:] = [0.0] * 5
    before = 0
    assert job.play(40, spent).said == []


def test_while_one_rank_is_silent_none_is_compared() -> None:
    """Its process is another one by now."""
    job = Played(4)
    job.places[3] = Place("node3", 2)
    heard = dict(job.places)
    job.places[3] = Place("node3", 1)
    job.play(40, noisy(14, {0: 2.0}), places=heard)
    assert (job.said, job.judge.scores) == ([], {})
