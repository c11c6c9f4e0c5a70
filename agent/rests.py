"""Rest: a rank that is in a step and does nothing at all, which no step limit finds before whole steps have passed.

A process whose train thread sleeps, or waits for a lock that comes free no more, uses no processor, and the kernel says
so at once. How long a rank may rest is learned as a step's limit is (`processor/step_limit.py`): twice as long as it
ever has, and at least half of `grace_s` longer. That is at first twice as much, and shrinks as one over the number of
steps. Pauses that no script has announced are so learned before they are an alarm; a job that waits for its device in
most of a step rests as long as that, and has its step's limit as before. `RestClock` is pure.

A limit that was too short heals itself: what a rank was replaced for counts as a rest of it, so its next process, and
all others of this node, may rest twice as long.
"""

import math
import time
from collections.abc import Callable

import msgspec

from ..processor.step_limit import LEAST_FACTOR, MARGIN, Longest
from ..protocol.types import Activity, JobSettings, RankProgress
from .linux import STOPPED_STATES, cpu_s, state_of
from .thread_waits import waits_for_nothing

LEAST_SHARE = 0.1
"""Of the median step: a pause of so little of it is not worth that the step is done again."""
IDLE_SHARE = 0.02
"""Of one core: gloo's thread looks around a hundred times a second, for each group, and needs 0.2 % for it."""
SHORTEST_S = 0.1  # over which it counts: two readings may be closer, and a thread look around between them
LOOK_AGAIN_S, LOOK_AGAIN_SHARE = 0.05, 0.1  # a thread that was just about to run is not so much later
_AT_WORK = frozenset({Activity.COMPUTING, Activity.UPDATING})
_WAITING = "S"
_Place = tuple[int, int, Activity, int]


def rest_after(steps: int, longest_s: float, *, margin_s: float, after_steps: int) -> float:
    """Return how long a rank may rest behind so many steps, of whose rests the longest took `longest_s`."""
    if steps < after_steps:
        return math.inf
    return max(LEAST_FACTOR * longest_s, longest_s + margin_s) + margin_s * after_steps / max(1, steps)


class _Rests:
    """The memory of one rank, over all of its processes here."""

    __slots__ = (
        "allowed_s", "cpu_s", "incarnation", "is_certain", "is_read", "longest", "look_s", "place", "read_cpu_s",
        "read_s", "since_s", "step", "steps", "still_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.longest = Longest()
        self.incarnation = -1
        self.allowed_s = math.inf
        self.is_read = False
        self.steps = self.step = 0  # of this process; where it was last
        self.end()

    def end(self, lasted_s: float = 0.0) -> None:
        """Remember a rest that is over, if it was one."""
        if lasted_s:
            self.longest.take(lasted_s, self.steps)
        self.place: _Place | None = None
        self.since_s = self.cpu_s = self.still_s = 0.0
        self.read_s = self.read_cpu_s = 0.0  # at the last reading
        self.look_s = 0.0  # a rest that is longer is to be looked at
        self.is_certain = False

    def worked(self, cpu_s: float, now: float) -> bool:
        """Say whether the process has computed, in this rest or since the last reading of it."""
        used_s, at_once_s = cpu_s - self.cpu_s, cpu_s - self.read_cpu_s
        is_idle = used_s <= IDLE_SHARE * max(SHORTEST_S, now - self.since_s)
        return not is_idle or at_once_s > IDLE_SHARE * max(SHORTEST_S, now - self.read_s)

    def follow(self, progress: RankProgress) -> None:
        """Note which process has the rank, and how many usual steps it has done."""
        if progress.incarnation != self.incarnation:
            self.end(self.still_s)
            self.longest.restart()
            self.incarnation, self.steps, self.step = progress.incarnation, 0, progress.step
        if progress.allowed_s:
            self.steps += max(0, progress.step - self.step)
        self.step = progress.step


class RestClock:
    """Finds the ranks of a node that rest for longer than ever. Pure: times are arguments.

    A rank is judged in a step that is like those before it, while it is in no collective, no data loader and no pause:
    where its process knows how long the step may take. `still_s` is what is certain of a rest, from one reading to
    another at the same place, between which the process has used hardly any processor. A reading in which the train
    thread wants to run says nothing.
    """

    def __init__(self, *, grace_s: float, after_steps: int) -> None:
        self._margin_s = MARGIN * grace_s
        self._after_steps = after_steps
        self._ranks: dict[int, _Rests] = {}

    def held_up(self, lag_s: float) -> None:
        """Excuse `lag_s` in which the agent did not run: the ranks may not have run either."""
        for rank in self._ranks.values():
            rank.since_s += lag_s

    def observe(self, progress: RankProgress, cpu_s: float | None, *, waits: bool, now: float) -> float:
        """Take in a reading. Return how long the rank has rested if that is longer than it may, else 0.

        `cpu_s`: what the process has used so far; None: not known. `waits`: the train thread does not want to run.
        """
        rank = self._ranks.setdefault(progress.rank, _Rests())
        rank.follow(progress)
        rank.is_read = True
        place = None
        if cpu_s is not None and progress.allowed_s and progress.activity in _AT_WORK:
            place = (progress.generation, progress.step, progress.activity, progress.collectives)
        if rank.place is not None and (cpu_s is None or place != rank.place or rank.worked(cpu_s, now)):
            rank.end(now - rank.since_s if rank.still_s else 0.0)
        if place is None or cpu_s is None:
            return 0.0
        if rank.place is None:
            rank.place, rank.since_s, rank.cpu_s = place, now, cpu_s
        rank.read_s, rank.read_cpu_s = now, cpu_s
        if waits:
            rank.still_s = max(0.0, now - rank.since_s)
        rank.allowed_s = self._allowed_s(rank, progress.median_step_s)
        return rank.still_s if rank.still_s > rank.allowed_s else 0.0

    def confirmed(self, number: int, look: Callable[[], bool]) -> bool:
        """Say whether all threads of a rank that rests for too long wait for nothing, by `look`: once in each rest.

        It looks again, ever more seldom, where that was not so.
        """
        rank = self._ranks[number]
        if not rank.is_certain and rank.still_s > rank.look_s:
            rank.is_certain = look()
            rank.look_s = (1 + LOOK_AGAIN_SHARE) * rank.still_s + LOOK_AGAIN_S
        return rank.is_certain

    def soonest_s(self, now: float) -> float:
        """Return how long after `now` threads of a rank are to be looked at, if it stays where it is.

        One that was not read since the last call is not waited for: its process is gone.
        """
        soonest_s = math.inf
        for rank in self._ranks.values():
            if rank.is_read and rank.still_s and not rank.is_certain:
                soonest_s = min(soonest_s, max(rank.allowed_s, rank.look_s) - (now - rank.since_s))
            rank.is_read = False
        return soonest_s

    def _allowed_s(self, rank: _Rests, median_s: float) -> float:
        """Return how long a rank may rest, by the longest rest of any rank here: one script runs in all of them."""
        return rest_after(
            rank.steps,
            max(each.longest.length_s for each in self._ranks.values()),
            margin_s=max(self._margin_s, LEAST_SHARE * median_s),
            after_steps=self._after_steps,
        )


class RestReader:
    """Reads of the kernel whether the processes of ranks are stopped, and whether they rest."""

    def __init__(self) -> None:
        self._clock: RestClock | None = None

    def start(self, settings: JobSettings) -> None:
        """Go by these settings from now on."""
        learns = settings.stall_learns
        self._clock = (
            RestClock(grace_s=settings.stall_grace_s, after_steps=settings.stall_after_steps) if learns else None
        )

    def held_up(self, lag_s: float) -> None:
        """Excuse `lag_s` in which the agent did not run."""
        if self._clock is not None:
            self._clock.held_up(lag_s)

    def read(self, progress: RankProgress, pid: int) -> RankProgress:
        """Return a step clock with what the kernel knows of the process."""
        state = state_of(pid)
        return msgspec.structs.replace(
            progress, suspended=state in STOPPED_STATES, rest_s=self._rest_s(progress, pid, waits=state == _WAITING)
        )

    def soonest_s(self) -> float:
        """Return in how many seconds a rank is to be read again, to find its rest as soon as it is too long."""
        return math.inf if self._clock is None else self._clock.soonest_s(time.monotonic())

    def _rest_s(self, progress: RankProgress, pid: int, *, waits: bool) -> float:
        clock = self._clock
        if clock is None:
            return 0.0
        used_s = cpu_s(pid) if progress.allowed_s else None
        rest_s = clock.observe(progress, used_s, waits=waits, now=time.monotonic())
        if not rest_s or not clock.confirmed(progress.rank, lambda: waits_for_nothing(pid, progress.step_age_s)):
            return 0.0
        return rest_s
