"""How long a step may take before its rank is looked at, learned from the steps before it. Pure: times are arguments.

A policy allows so many median steps and some seconds, which has to do for loaders that pause as well as for steps that
take the same time to the millisecond. Here the limit follows from the longest step that was seen: twice as long, and at
least half of the policy's seconds more. What a process has not seen yet may still come, so at first the policy's limit
holds, and the distance to it shrinks as one over the number of steps. It is never above the policy's.

A limit that was too short heals itself. The ranks that waited have broken off their step when it was reached, and count
that as a step of this length: the next one is allowed half as much again at least, up to the policy's limit.
"""

import math
from collections import deque

from ..protocol.types import WATCHED, Activity

MARGIN = 0.5
"""Of the policy's seconds, beyond the longest step seen: what has never been in the way may be for once."""
LEAST_FACTOR = 2.0
"""Times the longest step seen: a core that is shared with another process from now on makes it twice as long."""
REMEMBERED_STEPS = 50_000
SEEN_S = 0.5  # a pause that is shorter may lie between two readings of the agent, and is a part of the step
_GRAINS = 32  # of a doubling: kept are lengths rounded up to one of these, so that few are
_SHORTEST_S = 1e-4
_SETTLING = frozenset({Activity.STARTING, Activity.CHECKPOINTING, Activity.RECOVERING})
"""In the step behind one of these a rank may wait for others that still write, or that link up."""


def limit_after(steps: int, longest_s: float, *, most_s: float, margin_s: float, after_steps: int) -> float:
    """Return how long a step may take behind so many steps, of which the longest took `longest_s`.

    `most_s`: by the policy, which is all there is up to `after_steps`. `margin_s`: at least, beyond the longest.
    """
    settled_s = max(LEAST_FACTOR * longest_s, longest_s + margin_s)
    unsure = after_steps / max(after_steps, steps)
    return min(most_s, settled_s + unsure * (most_s - settled_s))


class Longest:
    """The longest of what the last REMEMBERED_STEPS steps had. Memory is bounded by the lengths, not by the steps."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, int]] = deque()  # steps and lengths in grains, each longer than the next

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def length_s(self) -> float:
        """The longest, a little rounded up; 0: there was none."""
        return 2 ** (self._kept[0][1] / _GRAINS) if self._kept else 0.0

    def take(self, length_s: float, step: int) -> None:
        """Take in a length of a step, and forget those of steps long before."""
        grains = math.ceil(_GRAINS * math.log2(max(length_s, _SHORTEST_S)))
        while self._kept and self._kept[-1][1] <= grains:
            self._kept.pop()
        self._kept.append((step, grains))
        while self._kept[0][0] <= step - REMEMBERED_STEPS:
            self._kept.popleft()

    def restart(self) -> None:
        """Count steps from 0 again, and keep the longest of those before as one of the next."""
        longest = [(0, grains) for _, grains in self._kept][:1]
        self._kept = deque(longest)


class StepLimit:
    """The limit of one process. It hears of all that its step clock hears."""

    def __init__(self, *, factor: float, grace_s: float, after_steps: int) -> None:
        """Hold no step to more than `factor` median steps + `grace_s`."""
        self._factor, self._grace_s, self._after_steps = factor, grace_s, after_steps
        self._steps = 0
        self._longest = Longest()
        self._since_s: float | None = None  # the clock stood at 0
        self._apart_s: float | None = None  # it does not count since then
        self._not_counted_s = 0.0
        self._is_usual = False
        self._allowed_s = 0.0

    @property
    def allowed_s(self) -> float:
        """The limit of the present step; 0: nothing is known of one like it, and the policy's holds."""
        return self._allowed_s if self._is_usual else 0.0

    def doing(self, activity: Activity, now: float) -> None:
        """Take in what the train thread does from now on."""
        was_apart = self._apart_s is not None
        self._count_out(now)
        if activity not in WATCHED:
            if activity is Activity.RECOVERING and not was_apart:
                self._take(min(self._age_s(now), self.allowed_s))
            self._apart_s = now
        if activity in _SETTLING:
            self._is_usual = False

    def begins(self, now: float) -> None:
        """Take in that a step begins, for which the clock is set to 0."""
        self._take(self._age_s(now))
        self._restart(now)

    def commits(self, now: float, median_s: float) -> None:
        """Take in that a step is committed, and that the clock is set to 0. `median_s`: of the last steps."""
        self._steps += self._is_usual
        self._take(self._age_s(now))
        self._restart(now)
        self._is_usual = True
        most_s = self._factor * median_s + self._grace_s
        longest_s = self._longest.length_s or most_s
        self._allowed_s = limit_after(
            self._steps,
            longest_s,
            most_s=most_s,
            margin_s=MARGIN * self._grace_s,
            after_steps=self._after_steps,
        )

    def _restart(self, now: float) -> None:
        self._since_s, self._apart_s, self._not_counted_s = now, None, 0.0

    def _count_out(self, now: float) -> None:
        if self._apart_s is not None and now - self._apart_s >= SEEN_S:
            self._not_counted_s += now - self._apart_s
        self._apart_s = None

    def _age_s(self, now: float) -> float:
        self._count_out(now)
        return 0.0 if self._since_s is None else now - self._since_s - self._not_counted_s

    def _take(self, length_s: float) -> None:
        """Remember the length of a step, or of what lies between two, if it is like those that follow."""
        if not self._is_usual:
            return
        self._longest.take(length_s, self._steps)
