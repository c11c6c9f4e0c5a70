"""The time of a rank's steps, by what it was spent on: all ranks' steps take equally long, as they wait for each other.

Pure: times are arguments. The step clock of a process and that of a simulated one go by it.
"""

import math

from ..protocol.types import Activity, StepTimes

_AT_WORK = frozenset({Activity.COMPUTING, Activity.UPDATING})
_WITH_OTHERS = frozenset({Activity.COMMITTING, Activity.COLLECTIVE})


class OwnTime:
    """Books what the time of a rank's steps is spent on. Pure: times are arguments, `cpu_s` that of the train thread.

    In a step the train thread computes, waits for input, or waits for others: in the wait for a collective, and in the
    commit barrier. DDP waits for its buckets in C++, where nothing tells of it, and computes on beside others: of the
    time from a collective's start to its end in another thread, so much was a wait as the thread has used no processor.
    Pauses and checkpoints are booked as nothing.
    """

    def __init__(self) -> None:
        self.stage = -1
        self._steps = self._tokens = 0
        self._own_s = self._input_s = self._wait_s = 0.0
        self._activity: Activity | None = None  # None: between two steps
        self._since_s = 0.0
        self._waited_s = 0.0  # of the time since then
        self._beside_from = (0.0, 0.0)  # the last collective began: time, and processor time of the train thread
        self._beside_s = 0.0  # from then until all were over, in another thread

    def begin(self, now: float) -> None:
        """Begin a step."""
        self._activity, self._since_s = Activity.COMPUTING, now
        self._waited_s = self._beside_s = 0.0

    def doing(self, activity: Activity, now: float, cpu_s: float) -> None:
        """Go on to something else in the step."""
        if self._activity is None:
            return
        self._count_beside(now, cpu_s)
        spent_s = now - self._since_s
        if self._activity in _AT_WORK:
            waited_s = min(self._waited_s, spent_s)
            self._own_s += spent_s - waited_s
            self._wait_s += waited_s
        elif self._activity in _WITH_OTHERS:
            self._wait_s += spent_s
        self._activity, self._since_s, self._waited_s = activity, now, 0.0

    def end(self, now: float, cpu_s: float) -> StepTimes:
        """End the step, which is committed; return the times of all steps so far."""
        self._steps += self._activity is not None
        self.doing(Activity.COMPUTING, now, cpu_s)
        self._activity = None
        own_us, input_us, wait_us = (round(1e6 * each_s) for each_s in (self._own_s, self._input_s, self._wait_s))
        return StepTimes(self._steps, own_us, input_us, wait_us, self._tokens, self.stage)

    def counted(self, tokens: float) -> None:
        """Take in how many tokens, or samples, a step has."""
        if math.isfinite(tokens) and tokens > 0:
            self._tokens += round(tokens)

    def loaded(self, seconds: float) -> None:
        """Take in that the next input was waited for, in a step or before it."""
        self._input_s += seconds
        if self._activity in _AT_WORK:
            self._since_s += seconds

    def entered(self, now: float, cpu_s: float) -> None:
        """Take in that a collective has begun."""
        self._count_beside(now, cpu_s)
        self._beside_from = now, cpu_s

    def waited(self, seconds: float, now: float, cpu_s: float) -> None:
        """Take in that the train thread has waited for a collective."""
        if self._activity in _AT_WORK:
            self._waited_s += seconds
            self._beside_from, self._beside_s = (now, cpu_s), 0.0

    def ended_beside(self, now: float) -> None:
        """Take in that all collectives are over, the last of them in another thread."""
        if self._activity in _AT_WORK:
            self._beside_s = max(0.0, now - max(self._beside_from[0], self._since_s))

    def _count_beside(self, now: float, cpu_s: float) -> None:
        if self._beside_s:
            (from_s, from_cpu_s), beside_s, self._beside_s = self._beside_from, self._beside_s, 0.0
            idle_s = now - from_s - (cpu_s - from_cpu_s)
            self._waited_s += min(beside_s, max(0.0, idle_s))
