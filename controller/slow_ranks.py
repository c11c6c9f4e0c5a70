"""Find the ranks that hold up the others by being slow, by the times in heartbeats. Pure: time is an argument.

All ranks' steps take equally long, as they wait for each other. What differs is how much of it each has computed
(`processor/own_time.py`). Rounds of some steps are compared. In each a rank's own time is held against
the median of the others of its stage, who do equal work; by tokens, where all of them report any. Where it has no
equals, its own history is held against that of all others. A rank is slow whose own time is too long in several
rounds on end, by so much that the step takes longer for it; how much is too long follows from how even the rounds are.
What it waits for its data loader is judged apart, and so are its connections (`slow_links.py`), of the same rounds.

Nothing here is kept: a controller that takes over begins to compare again, and knows what stands from the fault book.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..policies.schema import SlowAction, SlowPolicy
from ..protocol.incidents import JobStatus
from ..protocol.messages import NodeHeartbeat
from ..protocol.types import CONTROLLER, Assertion, FaultKind, FaultReport, LinkUse, StepTimes
from ..protocol.wording import ranks_text
from .recovery.state import JobState, Phase
from .slow_links import DELAYED_ACK_S, LEAST_FACTOR, Blamed, blamed, carried, compared, low_third

ROUND_STEPS = 4
ROUNDS = 3  # on end, before a rank is called slow
WELL_ROUNDS = 6  # on end, before it is called well again
ONE_WAY = 0.25  # of a round: so much counts one in which links are slow in one direction of a machine alone
LEAST_SHARE = 0.1  # of the step, by which it has to take longer for a slow rank
LEAST_LINK_SHARE = 0.2  # all others wait for a slow link, for most of the step
NOISE = 6.0  # so many times as much as a rank differs from round to round is no noise
LINK_NOISE = 9.0  # times the low third of what links differ by: of three machines a slow one is at two thirds of them
HISTORY_ROUNDS = 40
LEAST_HISTORY = 8  # rounds
PER_RANK_S = 0.0005  # to look at 10,000 ranks takes some milliseconds: each 5 s then
AGAIN_S = 60.0  # a report that has changed nothing is said again


class HeardTimes(msgspec.Struct, frozen=True):
    """The times and links of a process, by its latest heartbeat."""

    incarnation: int
    generation: int
    times: StepTimes
    links: tuple[LinkUse, ...]


class Place(msgspec.Struct, frozen=True):
    """The process that holds a rank now, and its node."""

    node: str
    incarnation: int


class _Mean(msgspec.Struct, frozen=True):
    """The mean step of one rank in one round, in seconds; `work`: its tokens."""

    own_s: float
    input_s: float
    wait_s: float
    work: float
    stage: int

    @property
    def step_s(self) -> float:
        return self.own_s + self.input_s + self.wait_s


class Score(msgspec.Struct, frozen=True):
    """The last round of a rank.

    `step_s`: its mean step. `ratio`: its own time to that of its equals. `late_s`: what it waited for input beyond what
    others did.
    """

    step_s: float
    own_s: float
    input_s: float
    ratio: float
    late_s: float


class _Standing:
    """How often on end a rank was found slow, or well, in one way."""

    def __init__(self) -> None:
        self.slow = 0.0
        self.well = 0
        self.since_s = 0.0

    def count(self, began_s: float, *, slow: float, well: bool) -> None:
        if slow and not self.slow:
            self.since_s = began_s
        self.slow = self.slow + slow if slow else 0.0
        self.well = self.well + 1 if well else 0


class _Noise:
    """How uneven the rounds of a job are, of ranks or of links: by how much one differs from the round before."""

    def __init__(self, times: float, usual: Callable[[Sequence[float]], float]) -> None:
        """`times`: so much more is no noise than what is `usual` among all differences."""
        self._times, self._usual = times, usual
        self._before: dict[Any, float] = {}
        self._noise: deque[float] = deque(maxlen=HISTORY_ROUNDS)

    def begin(self) -> None:
        """Compare the next round with none."""
        self._before = {}

    def allowed(self, values: Mapping[Any, float], factor: float) -> float:
        """Take in a round, and return from which ratio on something is slow: more where rounds are uneven."""
        steps = [
            abs(math.log(value / before))
            for each, value in values.items()
            if (before := self._before.get(each, 0.0)) > 0 and value > 0
        ]
        self._before = dict(values)
        if steps:
            self._noise.append(self._usual(steps))
        noise = statistics.median(self._noise) if self._noise else 0.0
        return max(factor, 1 + self._times * noise)


class SlowRanks:
    """Compares the ranks of one job."""

    def __init__(self) -> None:
        self._heard: dict[int, HeardTimes] = {}
        self._bases: dict[int, HeardTimes] = {}
        self._began_with: dict[int, HeardTimes] = {}  # the bases of the last round
        self._generation = -1
        self._began_s = 0.0  # the round that is under way
        self._round_began_s = 0.0  # the last one
        self._settles = True  # the first round after a recovery, which may be slow once, does not count
        self._standing: dict[tuple[FaultKind, int], _Standing] = {}
        self._own: dict[int, deque[float]] = {}  # of each rank, in rounds in which it was well
        self._noise, self._link_noise = _Noise(NOISE, statistics.median), _Noise(LINK_NOISE, low_third)
        self._said: dict[tuple[str, Assertion], float] = {}
        self._next_s = 0.0
        self._links: dict[int, Blamed] = {}  # of the ranks of a machine to blame, in the last round
        self.scores: dict[int, Score] = {}

    def take(self, heartbeat: NodeHeartbeat) -> None:
        """Take in the times of a node."""
        for progress in heartbeat.ranks:
            if progress.times is not None:  # of a rank that the job does not have nothing is looked at
                self._heard[progress.rank] = HeardTimes(
                    progress.incarnation, progress.generation, progress.times, progress.links
                )

    def is_due(self, now: float, state: JobState) -> bool:
        """Say whether it is time to look at a job: not too soon again, and only while it trains."""
        return now >= self._next_s and state.policy.slow.then is not SlowAction.IGNORE and state.phase is Phase.RUNNING

    def look(self, now: float, state: JobState) -> tuple[FaultReport, ...]:
        """Return what is to be reported now of a job; nothing before it `is_due`."""
        policy = state.policy.slow
        if not self.is_due(now, state):
            return ()
        self._next_s = now + PER_RANK_S * state.world.size
        places = {holder.rank: Place(holder.node, holder.incarnation) for holder in state.world.holders}
        standing = {fault.report.fault_id for fault in state.book.standing() if fault.report.seen_by == CONTROLLER}
        return self.judge(now, policy, places, state.generation, standing)

    def judge(
        self,
        now: float,
        policy: SlowPolicy,
        places: Mapping[int, Place],
        generation: int,
        standing: Collection[str] = (),
    ) -> tuple[FaultReport, ...]:
        """Return what is to be reported now: that a node has become slow, or is well again.

        `places`: all ranks of a world that trains. `standing`: the ids of the faults that were reported and stand.
        """
        means = self._round(now, places, generation)
        if means is None:
            return ()
        self._compare(means, policy)
        self._compare_links(means, policy)
        return tuple(self._reports(now, policy, places, standing))

    @property
    def worst(self) -> float:
        """The own time of the slowest rank, in times of that of its equals; 0: none was compared."""
        return max((score.ratio for score in self.scores.values()), default=0.0)

    def overlay(self, status: JobStatus) -> JobStatus:
        """Return a status with the scores of the last round."""
        ranks = tuple(
            rank
            if (score := self.scores.get(rank.rank)) is None
            else msgspec.structs.replace(rank, own_s=score.own_s, input_s=score.input_s, slowness=score.ratio)
            for rank in status.ranks
        )
        return msgspec.structs.replace(status, ranks=ranks)

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _round(self, now: float, places: Mapping[int, Place], generation: int) -> dict[int, _Mean] | None:
        """Return the means of a round that is over: all ranks have committed enough steps since it began."""
        if generation != self._generation:
            self._generation = generation
            self._bases.clear()
            self._noise.begin()
            self._link_noise.begin()
            self._standing.clear()
            self._settles = True
        means = {}
        for rank, place in places.items():
            heard, base = self._heard.get(rank), self._bases.get(rank)
            if heard is None or (heard.incarnation, heard.generation) != (place.incarnation, generation):
                return None
            if base is None or base.incarnation != heard.incarnation:
                self._begin(now, places)
                return None
            mean = _mean(base.times, heard.times)
            if mean is None:
                return None
            means[rank] = mean
        settles, self._settles = self._settles, False
        self._round_began_s, self._began_with = self._began_s, self._bases
        self._begin(now, places)
        return None if settles or not means else means

    def _begin(self, now: float, places: Mapping[int, Place]) -> None:
        self._began_s = now
        self._bases = {rank: heard for rank in places if (heard := self._heard.get(rank)) is not None}

    # --- who is slow ----------------------------------------------------------------------------------------------

    def _compare(self, means: Mapping[int, _Mean], policy: SlowPolicy) -> None:
        """Score every rank, and count in how many rounds on end each was slow."""
        costs, references = self._references(means)
        allowed = self._noise.allowed(costs, policy.factor)
        inputs = _of_others({rank: mean.input_s for rank, mean in means.items()})
        self.scores = {}
        for rank, mean in means.items():
            reference = references.get(rank)
            ratio = 1.0 if not reference else costs[rank] / reference
            late_s = mean.input_s - inputs.get(rank, mean.input_s)
            self.scores[rank] = Score(mean.step_s, mean.own_s, mean.input_s, ratio, late_s)
            least_s = LEAST_SHARE * mean.step_s
            more_s = mean.own_s * (1 - 1 / ratio) if ratio > 1 else 0.0
            slow = ratio > allowed and more_s > least_s
            well = ratio < 1 + (allowed - 1) / 2 or more_s < least_s / 2
            self._count(FaultKind.SLOW, rank, slow=slow, well=well)
            self._count(FaultKind.SLOW_INPUT, rank, slow=late_s > least_s, well=late_s < least_s / 2)
            if not slow and reference != 0:
                self._own.setdefault(rank, deque(maxlen=HISTORY_ROUNDS)).append(costs[rank])

    def _compare_links(self, means: Mapping[int, _Mean], policy: SlowPolicy) -> None:
        """Count in how many rounds on end the connections of each rank's machine were slow."""
        rounds = [(self._began_with[rank], self._bases[rank]) for rank in means]
        links = carried((before.links, after.links, after.times.steps - before.times.steps) for before, after in rounds)
        least_s = max(LEAST_LINK_SHARE * statistics.median(mean.step_s for mean in means.values()), DELAYED_ACK_S)
        factor = max(policy.factor, LEAST_FACTOR)
        judged = compared(links)
        allowed = self._link_noise.allowed({each.ends: max(each.busy_s, DELAYED_ACK_S) for each in judged}, factor)
        slow = blamed(link for link in judged if link.is_slow(allowed, least_s))
        nearly = blamed(link for link in judged if link.is_slow(1 + (allowed - 1) / 2, least_s / 2))
        self._links = {}
        for rank in means:
            addresses = {each.here for each in self._bases[rank].links}
            found = [slow[address] for address in addresses & slow.keys()]
            if found:
                self._links[rank] = max(found, key=lambda each: (each.both_ways, each.slowest.busy_s))
            well = not addresses & nearly.keys()
            counts = 0.0 if not found else 1.0 if self._links[rank].both_ways else ONE_WAY
            self._count(FaultKind.SLOW_LINK, rank, slow=counts, well=well)

    def _count(self, kind: FaultKind, rank: int, *, slow: float, well: bool) -> None:
        """Count a round; `slow`: how much of one it counts, 0 if the rank was not slow."""
        counts = self._standing.setdefault((kind, rank), _Standing())
        counts.count(self._round_began_s, slow=slow, well=well)

    def _references(self, means: Mapping[int, _Mean]) -> tuple[dict[int, float], dict[int, float]]:
        """Return what the work of each rank has cost it, and what it is held against, where there is anything."""
        stages: dict[int, list[int]] = {}
        for rank, mean in means.items():
            stages.setdefault(mean.stage, []).append(rank)
        costs: dict[int, float] = {}
        references: dict[int, float] = {}
        alone: list[int] = []
        for stage, ranks in stages.items():
            by_work = all(means[rank].work > 0 for rank in ranks)
            for rank in ranks:
                costs[rank] = means[rank].own_s / (means[rank].work if by_work else 1.0)
            if stage >= 0 and len(ranks) > 1:
                references |= _of_others({rank: costs[rank] for rank in ranks})
            else:
                alone += ranks
        usual = {
            rank: statistics.median(past) for rank in alone if len(past := self._own.get(rank, ())) >= LEAST_HISTORY
        }
        drift = _of_others({rank: costs[rank] / each for rank, each in usual.items() if each > 0})
        references |= {rank: usual[rank] * each for rank, each in drift.items()}
        return costs, references

    # --- what is said ---------------------------------------------------------------------------------------------

    def _reports(
        self,
        now: float,
        policy: SlowPolicy,
        places: Mapping[int, Place],
        standing: Collection[str],
    ) -> Iterable[FaultReport]:
        by_node: dict[str, list[int]] = {}
        for rank, place in places.items():
            by_node.setdefault(place.node, []).append(rank)
        for kind in (FaultKind.SLOW, FaultKind.SLOW_LINK, FaultKind.SLOW_INPUT):
            for node, ranks in by_node.items():
                fault_id = f"{kind} {node}"
                slow = [rank for rank in ranks if self._is_slow(now, kind, rank, policy)]
                well = all(self._standing[kind, rank].well >= WELL_ROUNDS for rank in ranks)
                if slow and fault_id not in standing and self._is_new(now, fault_id, Assertion.OCCUR):
                    yield self._report(now, kind, node, slow, Assertion.OCCUR)
                elif well and fault_id in standing and self._is_new(now, fault_id, Assertion.RECOVER):
                    yield self._report(now, kind, node, ranks, Assertion.RECOVER)

    def _is_slow(self, now: float, kind: FaultKind, rank: int, policy: SlowPolicy) -> bool:
        counts = self._standing[kind, rank]
        return counts.slow >= ROUNDS and now - counts.since_s >= policy.for_s

    def _is_new(self, now: float, fault_id: str, assertion: Assertion) -> bool:
        said_s = self._said.get((fault_id, assertion), -math.inf)
        if now - said_s < AGAIN_S:
            return False
        self._said[fault_id, assertion] = now
        self._said.pop((fault_id, Assertion.OCCUR if assertion is Assertion.RECOVER else Assertion.RECOVER), None)
        return True

    def _report(self, now: float, kind: FaultKind, node: str, ranks: list[int], assertion: Assertion) -> FaultReport:
        if assertion is Assertion.RECOVER:
            detail = _well(kind, ranks)
        elif kind is FaultKind.SLOW_LINK:
            detail = self._slow_links(ranks)
        else:
            detail = self._slow_ranks(kind, ranks)
        return FaultReport(
            kind,
            now,
            CONTROLLER,
            detail,
            node=node,
            fault_id=f"{kind} {node}",
            assertion=assertion,
            scores=self._scores(kind, ranks) if assertion is Assertion.OCCUR else {},
        )

    def _scores(self, kind: FaultKind, ranks: list[int]) -> dict[int, float]:
        """Return by how many times ranks are slower than others, where that is what they are named for."""
        if kind is FaultKind.SLOW:
            return {rank: self.scores[rank].ratio for rank in ranks}
        if kind is FaultKind.SLOW_LINK:
            slowest = {rank: self._links[rank].slowest for rank in ranks}
            return {rank: link.busy_s / link.usual_s for rank, link in slowest.items() if link.usual_s > 0}
        return {}

    def _slow_links(self, ranks: list[int]) -> str:
        link = max((self._links[rank].slowest for rank in ranks), key=lambda link: link.busy_s)
        step_ms, busy_ms = 1000 * max(self.scores[rank].step_s for rank in ranks), 1000 * link.busy_s
        return (
            f"slow links of {ranks_text(ranks)}: in a step of {step_ms:.0f} ms data is on its way for {busy_ms:.0f} ms "
            f"from {link.ends[0]} to {link.ends[1]}, and for {1000 * link.usual_s:.0f} ms elsewhere"
        )

    def _slow_ranks(self, kind: FaultKind, ranks: list[int]) -> str:
        of_input = kind is FaultKind.SLOW_INPUT
        worst = max(ranks, key=lambda rank: self.scores[rank].late_s if of_input else self.scores[rank].ratio)
        score = self.scores[worst]
        if of_input:
            return (
                f"slow input of {ranks_text(ranks)}: in a step of {1000 * score.step_s:.0f} ms rank {worst} waits "
                f"{1000 * score.input_s:.0f} ms for its data loader, {1000 * score.late_s:.0f} ms longer than others"
            )
        return (
            f"{_subject(ranks)} slow: rank {worst} computes for {1000 * score.own_s:.0f} ms of a step of "
            f"{1000 * score.step_s:.0f} ms, {score.ratio:.2f} times as long as others with equal work"
        )


def _subject(ranks: list[int]) -> str:
    return f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _well(kind: FaultKind, ranks: list[int]) -> str:
    if kind is FaultKind.SLOW_LINK:
        return f"the links of {ranks_text(ranks)} are as fast as others"
    return f"{_subject(ranks)} as fast as others with equal work"


def _mean(base: StepTimes, times: StepTimes) -> _Mean | None:
    """Return the mean step between two readings of one process; None: too few steps lie between them."""
    steps = times.steps - base.steps
    if steps < ROUND_STEPS:
        return None
    own_s, input_s, wait_s = (
        max(0, after - before) / steps / 1e6
        for before, after in (
            (base.own_us, times.own_us),
            (base.input_us, times.input_us),
            (base.wait_us, times.wait_us),
        )
    )
    return _Mean(own_s, input_s, wait_s, (times.tokens - base.tokens) / steps, times.stage)


def _of_others(values: Mapping[int, float]) -> dict[int, float]:
    """Return for each rank the median of all others; nothing where there are none."""
    if len(values) < 2:
        return {}
    ordered = sorted(values, key=lambda rank: values[rank])
    numbers = [values[rank] for rank in ordered]
    medians = {}
    for place, rank in enumerate(ordered):
        last = len(numbers) - 2  # the place of the last of the others
        pair = (last // 2, (last + 1) // 2)
        low, high = (numbers[each + (each >= place)] for each in pair)
        medians[rank] = (low + high) / 2
    return medians
