"""The step ledger: what this rank has committed, and the order that makes a step consistent.

A step ends in this order: all its collectives, then `ready`, then the commit barrier, then the purely local update,
then `committed`. So at any fault all survivors have committed step s, or hold its final gradients, or are still
computing it; there is never more than one step of skew, and never half an update.

With the commit barrier each rank's own state (random numbers, data position) goes to a buddy on another node. Nobody
commits before everybody has entered the barrier, and nobody enters before its ward's state is here; so whoever dies,
the state that was his alone is at hand for the step that will be repeated.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from ..protocol.errors import CommunicatorError, Interrupted, ProtocolViolation
from ..protocol.types import Activity, Moment

if TYPE_CHECKING:
    from .lifecycle import Framework
    from .moments import Moments
    from .step_clock import StepClock

HISTORY_STEPS = 31


class Surroundings(Protocol):
    """What the ledger needs of its process. The runtime is one; a script without midstep around it has another."""

    def interrupted(self) -> bool:
        """Whether the controller wants the train thread to stop."""
        ...

    def step_done(self) -> None:
        """Return when the device has done all that was queued: until then a collective may still fail.

        Raises what the device raises.
        """
        ...

    def update_done(self) -> None:
        """Likewise for the update: until then its last operators may still fail."""
        ...

    def begins(self, step: int) -> bool:
        """Whether the step may be begun; False where all ranks are to stop between two steps."""
        ...

    def exchange_own(self, step: int, blob: bytes) -> None:
        """Keep the own state, hand it to the buddy, take the ward's; return when every rank has done so."""
        ...

    def hold_at_barrier(self) -> bool:
        """The commit barrier has broken: report, wait for orders, and say whether to apply the update."""
        ...

    def committed(self, committed: int, median_step_s: float) -> None:
        """An update has been applied."""
        ...

    def barrier_passed(self) -> None:
        """Every rank has everything of the step before."""
        ...


class Step:
    """One step of the loop. `index` is 0-based."""

    def __init__(self, ledger: "Ledger", index: int) -> None:
        self.index = index
        self._ledger = ledger

    def update(self) -> "Update":
        """Bracket the local update: `with step.update(): optimizer.step(); scheduler.step()`.

        Entering passes the commit barrier, so every collective of the step has to come before. Inside the block no
        collective is allowed. Leaving it commits the step.
        """
        return Update(self._ledger, self.index)


class Update:
    """The context manager that `Step.update` returns."""

    def __init__(self, ledger: "Ledger", index: int) -> None:
        self._ledger = ledger
        self._index = index

    def __enter__(self) -> None:
        self._ledger.enter_update(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._ledger.leave_update(self._index)


class Ledger:
    """This rank's steps. Used by the train thread only."""

    def __init__(
        self,
        surroundings: Surroundings,
        framework: "Framework",
        moments: "Moments",
        step_clock: "StepClock",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._surroundings = surroundings
        self._framework = framework
        self._moments = moments
        self._step_clock = step_clock
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._began_s = 0.0
        self.median_step_s = 0.0  # of the last steps; 0 before the first
        self.count = 0  # updates applied, so also the index of the next step
        self.ready = False  # the gradients of step `count` are final
        self.updating = False
        self.leave_after_update = False  # orders are waiting: the update was applied for them

    def steps(self, total: int) -> Iterator[Step]:
        """Yield the steps that are left of `total`, from the one to be repeated."""
        while self.count < total:
            index = self.begin()
            yield Step(self, index)
            if self.count == index:
                raise ProtocolViolation(
                    f"step {index} ended without `with step.update():` around the optimizer's step. "
                    "Put it there, after all collectives of the step."
                )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the step clock around something that takes long in the middle of training: an evaluation, say."""
        self._step_clock.doing(Activity.PAUSED)
        try:
            yield
        finally:
            self._step_clock.doing(Activity.COMPUTING)

    def reset(self, count: int) -> None:
        """Stand at `count` committed updates, in rollback."""
        self.count, self.ready, self.updating, self.leave_after_update = count, False, False, False

    def begin(self) -> int:
        """Begin the next step and return its index; for a loop that is not `steps`. Raises Interrupted."""
        index = self.count
        if self.leave_after_update or self._surroundings.interrupted() or not self._surroundings.begins(index):
            raise Interrupted
        self._began_s = self._clock()
        self._step_clock.begin_step(index, self.median_step_s)
        if self._moments.armed:
            self._fire_inside(index)
        return index

    def _fire_inside(self, index: int) -> None:
        for moment in (Moment.FORWARD, Moment.BACKWARD, Moment.REDUCTION, Moment.GATHER):
            if self._moments.waits_for(moment, index):
                self._framework.fire_in(moment, partial(self._moments.reached, moment, index))

    def enter_update(self, index: int) -> None:
        """Pass the commit barrier of a step. Raises Interrupted when the step has to be repeated."""
        if index != self.count:
            raise ProtocolViolation(f"step {index} is updated a second time, or out of turn (at {self.count}).")
        if self._surroundings.interrupted():
            raise Interrupted
        self._step_clock.doing(Activity.COMMITTING)
        self._surroundings.step_done()
        blob = self._framework.capture_own()
        self.ready = True
        self._moments.reached(Moment.BARRIER, index)
        try:
            self._surroundings.exchange_own(index + 1, blob)
        except CommunicatorError:
            broken = True
        else:
            broken = False
        # Outside the except block: what it holds would keep the dead step's groups alive while orders are awaited.
        if broken:
            if not self._surroundings.hold_at_barrier():
                raise Interrupted
            self.leave_after_update = True
        else:
            self._surroundings.barrier_passed()
        self.updating = True
        self._step_clock.doing(Activity.UPDATING)
        self._moments.reached(Moment.UPDATE, index)

    def leave_update(self, index: int) -> None:
        """The update is applied: the step is committed."""
        self._surroundings.update_done()
        self.count, self.ready, self.updating = index + 1, False, False
        self._durations.append(self._clock() - self._began_s)
        self.median_step_s = statistics.median(self._durations)
        self._step_clock.committed(self.count, self.median_step_s)
        # What the loop does after its update (logging, say) still runs; orders are followed before the next step.
        if not self.leave_after_update:
            self._surroundings.committed(self.count, self.median_step_s)
