"""The step clock: what the train thread is doing, written where the agent reads it without a message.

It also counts collectives: of two ranks that stand still, the one that has entered fewer is the one the other waits
for. And it books the time of each step: all ranks' steps take equally long, as they wait for each other, so only a
rank's own time tells that it is slow.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..protocol.types import Activity, InjectionPoint, StepTimes
from .own_time import OwnTime
from .step_limit import StepLimit

if TYPE_CHECKING:
    from ..protocol.blackbox import BlackBox
    from .injection_points import InjectionPoints


class StepClock:
    """Writes the progress of a rank to its black box. It is also the communicator's observer."""

    def __init__(
        self,
        black_box: "BlackBox | None",
        injection_points: "InjectionPoints",
        incarnation: int,
        limit: StepLimit | None = None,
    ) -> None:
        """`limit`: learns how long a step may take. None: the policy says so."""
        self._limit = limit
        self._black_box = black_box
        self._injection_points = injection_points
        self._incarnation = incarnation
        self._pid = os.getpid()
        self._lock = threading.Lock()  # collectives can end in other threads
        self._generation = 0
        self._step = 0
        self._activity = Activity.STARTING
        self._collectives = 0
        self._outstanding = 0
        self._step_began_s = time.monotonic()
        self._own = OwnTime()
        self._thread = 0  # the train thread
        self._loading = False
        self._write(self._step_began_s, 0.0)
        if black_box is not None:
            black_box.set_times(StepTimes(0, 0, 0, 0))  # of the process before this one

    def generation(self, generation: int) -> None:
        """Begin a generation: count collectives from 0 again, on all ranks alike."""
        with self._lock:
            self._generation, self._collectives, self._outstanding = generation, 0, 0

    def begin_step(self, step: int, median_step_s: float) -> None:
        """Note that the train thread starts a step."""
        with self._lock:
            now_s = time.monotonic()
            if self._limit is not None:
                self._limit.begins(now_s)
            self._begin_step(step, median_step_s, now_s)
            self._thread = threading.get_ident()
            self._own.begin(now_s)

    def committed(self, step: int, median_step_s: float) -> None:
        """Note that `step` updates are applied, and start the clock of the next step."""
        with self._lock:
            now_s = time.monotonic()
            if self._limit is not None:
                self._limit.commits(now_s, median_step_s)
            self._begin_step(step, median_step_s, now_s)
            times = self._own.end(now_s, time.thread_time())
            if self._black_box is not None:
                self._black_box.set_times(times)

    def of_stage(self, stage: int) -> None:
        """Take in with which ranks this one does equal work."""
        self._own.stage = stage

    def counted(self, tokens: float) -> None:
        """Note how many tokens the present step has."""
        self._own.counted(tokens)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Book the time of a block as a wait for input. Inside another such block, or in another thread: nothing."""
        if self._loading or self._thread != threading.get_ident():
            yield
            return
        self._loading, began_s = True, time.monotonic()
        self._allow(0.0)  # a loader is uneven by nature: what was learned of the steps is no measure for it
        try:
            yield
        finally:
            self._loading = False
            self._allow(None)
            with self._lock:
                self._own.loaded(time.monotonic() - began_s)

    def _begin_step(self, step: int, median_step_s: float, now_s: float) -> None:
        self._step, self._activity = step, Activity.COMPUTING
        self._step_began_s = now_s
        self._write(now_s, median_step_s)

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Have values that the script has reported of a step seen from outside."""
        if self._black_box is not None:
            self._black_box.set_reported(self._incarnation, step, values)

    @property
    def activity(self) -> Activity:
        """The present activity of the train thread."""
        return self._activity

    def doing(self, activity: Activity) -> None:
        """Note what the train thread does now."""
        with self._lock:
            self._activity, now_s = activity, time.monotonic()
            self._own.doing(activity, now_s, time.thread_time())
            if self._limit is not None:
                self._limit.doing(activity, now_s)
            if self._black_box is not None:
                self._black_box.set_activity(activity, now_s)

    def entered(self, op: str, group: tuple[int, ...] = ()) -> None:
        """Note that a collective of the training starts."""
        self._injection_points.reached(InjectionPoint.COLLECTIVE, self._step, op, group)
        with self._lock:
            self._collectives += 1
            self._outstanding += 1
            now_s = time.monotonic()
            if self._thread == threading.get_ident():
                self._own.entered(now_s, time.thread_time())
            if self._black_box is not None:
                self._black_box.set_collectives(self._collectives)
                if self._outstanding == 1:
                    self._black_box.set_activity(Activity.COLLECTIVE, now_s)

    def left(self, op: str) -> None:
        """Note that a collective of the training is over."""
        with self._lock:
            self._outstanding = max(0, self._outstanding - 1)
            if self._outstanding:
                return
            now_s = time.monotonic()
            if self._thread != threading.get_ident():
                self._own.ended_beside(now_s)
            if self._black_box is not None:
                self._black_box.set_activity(self._activity, now_s)

    def waited(self, seconds: float) -> None:
        """Note that the calling thread has waited for a collective."""
        with self._lock:
            if self._thread == threading.get_ident():
                self._own.waited(seconds, time.monotonic(), time.thread_time())

    def _allow(self, allowed_s: float | None) -> None:
        """Write another limit of the present step; None: what was learned."""
        if self._limit is not None and self._black_box is not None:
            with self._lock:
                self._black_box.set_allowed(self._limit.allowed_s if allowed_s is None else allowed_s)

    def _write(self, now_s: float, median_step_s: float) -> None:
        if self._black_box is None:
            return
        self._black_box.write_progress(
            pid=self._pid,
            incarnation=self._incarnation,
            generation=self._generation,
            step=self._step,
            activity=self._activity,
            collectives=self._collectives,
            activity_began_s=now_s,
            step_began_s=self._step_began_s,
            median_step_s=median_step_s,
            allowed_s=0.0 if self._limit is None else self._limit.allowed_s,
        )
