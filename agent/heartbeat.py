"""Heartbeats of a node for the controller, and stall detection from the ranks' step clocks, by one timer.

Two clocks judge the same readings; both are pure. `StallClock` finds a step that takes too long by the rank's own
history: a collective's timeout is a fixed half hour, but a rank whose steps take 0.3 s and that has been in one for 2 s
is stuck. `SuspensionClock` finds a process that is stopped by SIGSTOP or a debugger. The kernel shows that at once, in
any step and also while a rank starts, joins or recovers, when there is no history of steps. Ranks that do nothing at
all are found by `rests.py`, and reported here.

Where the agent's own loop is late the whole machine may have been held up, and no rank is to blame.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ..protocol.messages import FaultReported, NewcomerWaiting, NodeHeartbeat
from ..protocol.types import (
    WATCHED,
    Activity,
    FaultKind,
    FaultReport,
    JobSettings,
    RankProgress,
    first_step_s,
    node_address,
)
from .ranks import RankHost

CLOCKS_PER_S = 5000  # step clocks of ranks that the controller is told in a second, all nodes together
CLOCKS_MOST_S = 5.0  # and what it knows of them is no older
TICK_S = 0.1
LEAST_TICK_S = 0.01
LAG_S = 0.05  # a loop that is later than this did not run
_Post = Callable[..., object]
# A process that is traced is stopped for a moment at each system call, and makes progress all the same.
_Place = tuple[int, int, int, Activity, int]
WAITING = frozenset({Activity.COLLECTIVE, Activity.COMMITTING})


def clocks_every_s(world_size: int, heartbeat_s: float) -> float:
    """Return how often the step clocks of a node are told in a job of so many ranks.

    In a large job most heartbeats are a sign of life alone, as its controller would take in thousands each second.
    """
    return max(heartbeat_s, min(CLOCKS_MOST_S, world_size / CLOCKS_PER_S))


class Heartbeat:
    """Ticks in the running loop from `start` to `close`. `post(message, reliable=...)` sends to the controller.

    `sign` shows the controller that the node lives, and nothing else.
    """

    def __init__(self, node: str, ranks: RankHost, *, post: _Post, sign: Callable[[], None]) -> None:
        self._node = node
        self._ranks = ranks
        self._post = post
        self._sign = sign
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = TICK_S
        self._next_heartbeat_s = 0.0
        self._heartbeat_s = self._clocks_s = TICK_S
        self._next_clocks_s = 0.0
        self._stalls: StallClock | None = None
        self._suspensions: SuspensionClock | None = None

    def start(self, settings: JobSettings, world_size: int = 1) -> None:
        """Tick by these settings from now on. Call it again when the job's own are known, with its size."""
        self._heartbeat_s = settings.heartbeat_s
        self._clocks_s = clocks_every_s(world_size, settings.heartbeat_s)
        # Nodes that have all started at the same time do not tell theirs at the same time.
        self._next_clocks_s = self._loop.time() + random.random() * (self._clocks_s - self._heartbeat_s)
        self._interval_s = min(TICK_S, settings.heartbeat_s)
        self._stalls = StallClock(
            factor=settings.stall_factor,
            grace_s=settings.stall_grace_s,
            after_steps=settings.stall_after_steps,
        )
        self._suspensions = SuspensionClock(limit_s=settings.stall_suspended_s)
        self._ranks.rests.start(settings)
        self.close()
        self._tick(self._loop.time())

    def forget(self, rank: int) -> None:
        """Drop the history of a rank that gets a new process."""
        if self._stalls is not None:
            self._stalls.forget(rank)
        if self._suspensions is not None:
            self._suspensions.forget(rank)

    def close(self) -> None:
        """Stop ticking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, planned_s: float) -> None:
        now = self._loop.time()
        lag_s = now - planned_s
        if lag_s > LAG_S:
            self._held_up(lag_s)
        readings = self._ranks.progress()
        self._judge(readings, now)
        for process in self._ranks.waiting(readings):
            self._post(NewcomerWaiting(node=self._node, process=process))
        self._ranks.prepare(readings)
        self._ranks.write_copies()
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._heartbeat_s - self._interval_s / 2
            self._ranks.watch_memory()
            if now >= self._next_clocks_s:
                self._next_clocks_s = now + self._clocks_s - self._heartbeat_s / 2
                readings = self._ranks.with_links(readings, now)
                self._post(NodeHeartbeat(self._node, time.time(), readings, self._ranks.reported()), reliable=False)
            else:
                self._sign()
        soonest_s = self._ranks.rests.soonest_s()
        if self._stalls is not None:
            soonest_s = min(soonest_s, self._stalls.soonest_s())
        planned_s = now + min(self._interval_s, max(LEAST_TICK_S, soonest_s))
        self._timer = self._loop.call_at(planned_s, self._tick, planned_s)

    def _held_up(self, lag_s: float) -> None:
        """Hold nothing against the ranks of this time: where this loop is late, they may have been held up, too."""
        self._ranks.rests.held_up(lag_s)
        if self._stalls is not None and self._suspensions is not None:
            self._stalls.held_up(lag_s)
            self._suspensions.held_up(lag_s)

    def _judge(self, readings: Sequence[RankProgress], now: float) -> None:
        """Report ranks that make no progress."""
        if self._stalls is None or self._suspensions is None:
            return
        most_s = self._stalls.most_allowed_s(readings)
        # One that rests holds up no other before that waits. A rank that is alone here cannot know that.
        is_felt = len(readings) == 1 or any(each.activity in WAITING for each in readings)
        for reading in readings:
            stall = self._stalls.observe(reading, most_s, is_felt=is_felt)
            if stall is not None:
                self._report(FaultKind.STALL, stall.detail, reading)
            suspension = self._suspensions.observe(reading, now)
            if suspension is not None:
                self._report(FaultKind.UNRESPONSIVE, suspension.detail, reading)

    def _report(self, kind: FaultKind, detail: str, progress: RankProgress) -> None:
        process, seen_by, at_s = (progress.rank, progress.incarnation), node_address(self._node), time.time()
        generation = progress.generation
        report = FaultReport.of_rank(
            kind, detail, process, node=self._node, generation=generation, seen_by=seen_by, at_s=at_s
        )
        self._post(FaultReported(report))


class Stall(msgspec.Struct, frozen=True):
    """A step that takes too long. `age_s`: how long it has taken, without the time that is excused."""

    progress: RankProgress
    age_s: float
    limit_s: float

    @property
    def detail(self) -> str:
        """Describe the stall for the fault report."""
        by = "by the last steps, with" if self.progress.allowed_s else "by"
        if self.progress.rest_s:
            return (
                f"the process has done nothing at all for {self.progress.rest_s:.2f} s, which is longer than it may by "
                f"the last steps, in step {self.progress.step}, which has taken {self.age_s:.2f} s; "
                f"{self.progress.activity}, {self.progress.collectives} collectives entered"
            )
        held = ", and the kernel says that the process is stopped" if self.progress.suspended else ""
        return (
            f"step {self.progress.step} has taken {self.age_s:.2f} s, where {self.limit_s:.2f} s are allowed {by} a "
            f"median of {self.progress.median_step_s:.3f} s; {self.progress.activity} for "
            f"{self.progress.activity_age_s:.2f} s, {self.progress.collectives} collectives entered{held}"
        )


class _History:
    """The memory of one rank between two readings."""

    __slots__ = (
        "due_s", "excused_s", "generation", "incarnation", "reports", "rest_due_s", "step", "steps_seen", "steps_total",
    )  # fmt: skip

    def __init__(self, progress: RankProgress) -> None:
        self.incarnation = progress.incarnation
        self.steps_total = 0  # seen to advance in this incarnation
        self._begin_generation(progress)

    def _begin_generation(self, progress: RankProgress) -> None:
        self.generation = progress.generation
        self.step = progress.step
        self.steps_seen = 0  # seen to advance in this generation
        self._begin_step()

    def _begin_step(self) -> None:
        self.excused_s = 0.0
        self.reports = 0
        self.due_s = math.inf  # from the last reading to the next report
        self.rest_due_s = 0.0  # a rest that is longer is to be reported

    def follow(self, progress: RankProgress) -> None:
        """Note where the rank is now."""
        if progress.generation != self.generation or progress.step < self.step:
            self._begin_generation(progress)
        elif progress.step > self.step:
            advanced = progress.step - self.step
            self.steps_seen += advanced
            self.steps_total += advanced
            self.step = progress.step
            self._begin_step()


class StallClock:
    """Finds the ranks of a node whose step takes too long.

    A rank is reported when the step's age exceeds what the processes here have learned to allow, the most of it
    (`processor/step_limit.py`), or where its own has not, `factor` x its median step + `grace_s`; and again each time
    that the age has doubled: the controller may have had reason to wait. It is not judged before it has `after_steps`
    steps of history, nor while it starts, checkpoints, recovers, pauses or has finished. Such time does not count
    against the step afterwards either. The first step after a recovery has as long as the controller gives it, as a
    new rank in the world may be slow once. It may be another one that is read first: steps are shorter than the time
    between two readings, and one that hangs there would else never be found.

    A rank that rests for too long (`rests.py`) is reported as soon as others wait, and again when its rest has doubled.
    """

    def __init__(self, *, factor: float, grace_s: float, after_steps: int) -> None:
        self._factor = factor
        self._grace_s = grace_s
        self._after_steps = after_steps
        self._histories: dict[int, _History] = {}

    def held_up(self, lag_s: float) -> None:
        """Excuse `lag_s` in which the agent did not run: the ranks may not have run either."""
        for history in self._histories.values():
            history.excused_s += lag_s

    def forget(self, rank: int) -> None:
        """Drop the history of a rank whose process has exited."""
        self._histories.pop(rank, None)

    def soonest_s(self) -> float:
        """Return how long after the readings since the last call a rank is to be reported, if it stays where it is."""
        due_s = min((history.due_s for history in self._histories.values()), default=math.inf)
        for history in self._histories.values():
            history.due_s = math.inf  # a rank that is not read again is not waited for
        return due_s

    def most_allowed_s(self, readings: Iterable[RankProgress]) -> float:
        """Return the most that any rank here allows a step: the others may wait for that one, with good reason."""
        return max(
            (each.allowed_s or self._by_policy_s(each) for each in readings if each.activity in WATCHED), default=0.0
        )

    def observe(self, progress: RankProgress, most_allowed_s: float = 0.0, *, is_felt: bool = True) -> Stall | None:
        """Take in a reading of a rank, and return its stall when it is to be reported.

        `most_allowed_s`: by all ranks here; one that goes by the policy does not go by it. `is_felt`: others may wait.
        """
        history = self._histories.get(progress.rank)
        if history is None or history.incarnation != progress.incarnation:
            history = self._histories[progress.rank] = _History(progress)
        if progress.activity not in WATCHED:
            # A newcomer's step jumps to the world's in here, without the rank having run it.
            history.step = max(history.step, progress.step)
            history.follow(progress)
            history.excused_s = progress.step_age_s
            return None
        history.follow(progress)
        done = history.steps_total if progress.times is None else max(history.steps_total, progress.times.steps)
        if progress.median_step_s <= 0 or done < self._after_steps:
            return None
        age_s = progress.step_age_s - history.excused_s
        limit_s = max(progress.allowed_s, most_allowed_s) if progress.allowed_s else self._by_policy_s(progress)
        if not history.steps_seen:
            limit_s = max(limit_s, first_step_s(progress.median_step_s))
        history.due_s = limit_s * 2**history.reports - age_s
        if history.steps_seen and is_felt and progress.rest_s > history.rest_due_s:
            history.rest_due_s = 2 * progress.rest_s
            return Stall(progress=progress, age_s=age_s, limit_s=limit_s)
        if history.due_s >= 0:
            return None
        history.reports += 1
        return Stall(progress=progress, age_s=age_s, limit_s=limit_s)

    def _by_policy_s(self, progress: RankProgress) -> float:
        return self._factor * progress.median_step_s + self._grace_s


class Suspension(msgspec.Struct, frozen=True):
    """A process that is stopped, for `stopped_s` without the time in which the agent did not run either."""

    progress: RankProgress
    stopped_s: float

    @property
    def detail(self) -> str:
        """Describe the suspension for the fault report."""
        return (
            f"the process has been stopped for {self.stopped_s:.1f} s by a signal or a debugger, while "
            f"{self.progress.activity} at step {self.progress.step}"
        )


def _place_of(progress: RankProgress) -> _Place:
    return progress.incarnation, progress.generation, progress.step, progress.activity, progress.collectives


class _Stop:
    """The memory of a process that is stopped."""

    __slots__ = ("place", "reports", "since_s")

    def __init__(self, place: _Place, since_s: float) -> None:
        self.place = place
        self.since_s = since_s
        self.reports = 0


class SuspensionClock:
    """Finds the ranks of a node whose process is stopped.

    A rank is reported when its process has been stopped for `limit_s` at one place, without a break, and again each
    time that this has doubled: the controller may not have been able to act. The controller also knows whether it is
    needed: what a rank says of its end may not have arrived.
    """

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stops: dict[int, _Stop] = {}

    def held_up(self, lag_s: float) -> None:
        """Excuse `lag_s` in which the agent did not run: what held it up may have stopped the ranks, too."""
        for stop in self._stops.values():
            stop.since_s += lag_s

    def forget(self, rank: int) -> None:
        """Drop what is remembered of a rank whose process has exited."""
        self._stops.pop(rank, None)

    def observe(self, progress: RankProgress, now: float) -> Suspension | None:
        """Take in a reading of a rank at `now`, and return its suspension when it is to be reported."""
        if not progress.suspended:
            self.forget(progress.rank)
            return None
        stop = self._stops.get(progress.rank)
        place = _place_of(progress)
        if stop is None or stop.place != place:
            stop = self._stops[progress.rank] = _Stop(place, now)
        stopped_s = now - stop.since_s
        if stopped_s < self._limit_s * 2**stop.reports:
            return None
        stop.reports += 1
        return Suspension(progress, stopped_s)
