"""The step ledger of a training process: it takes the train thread through the order of a step, and waits.

The order itself is in `step_order.py`, and what a step changes about the rank in `step_state.py`. Neither waits.

A step is committed when its update block ends, but it is not over then: the script may still change values of its own,
a running mean say. It is over when the script asks for the next step, or leaves the train function.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

from ..protocol.errors import CommunicatorError, ConfigurationError, ProtocolViolation
from ..protocol.types import Activity, InjectionPoint
from .framework import Mirrored, Trailing
from .step_order import Act, StepOrder

if TYPE_CHECKING:
    from .framework import Framework
    from .injection_points import InjectionPoints
    from .step_clock import StepClock
    from .step_order import StepState

HISTORY_STEPS = 31
SHOWN_S = 1.0  # between two readings of reported values that are for people only
Inputs = TypeVar("Inputs")
TOKENS = "tokens"  # the reported value by which the work of a step is measured


class Surroundings:
    """The ledger's view of its process. As it is here: a script without midstep, so no orders, barrier or copies."""

    def interrupted(self) -> bool:
        """Return whether the controller wants the train thread to stop."""
        return False

    def begins(self, step: int) -> bool:
        """Return whether the step may be begun; False where all ranks are to stop between two steps."""
        return True

    def loop_begins(self) -> None:
        """Note that the loop over steps is entered: everything before it was on the way to its first step."""

    def step_done(self) -> None:
        """Wait until the device has done all that was queued, in which a collective may fail. Raises what it raises."""

    def update_done(self) -> None:
        """Wait until the device has done the update: its last operators may fail until then."""

    def keep_local(self, step: int, blob: bytes) -> bytes:
        """Keep the local state as of `step` updates where it outlives the process; return what is to be swapped."""
        return blob

    def swap_local(self, step: int, blob: bytes) -> None:
        """Hand the rank-local state to the buddy; return when the peer copy is here. Raises CommunicatorError."""

    def meet(self, index: int) -> None:
        """Wait until the update of a step may begin, as every rank has come so far. Raises CommunicatorError."""

    def inputs(self, given: Any) -> Any:
        """Return the inputs of the step: those that are given, or those of the rank whose step is repeated here."""
        return given

    def compares(self, now: bool, *, has_batch: bool = True) -> None:
        """Note whether other replicas give the same to collectives `now`: from a forward pass to its reduced gradients.

        `has_batch`: each rank takes a batch before its first forward pass in a step.
        """

    def replay_ends(self) -> None:
        """Raise Interrupted if this was no step of this rank: it was repeated for another one, and has no update."""

    def hold_at_barrier(self) -> bool:
        """Report that the commit barrier broke, wait for orders, and return whether to apply the update."""
        return False

    def barrier_passed(self) -> None:
        """Note that every rank has everything of the step before."""

    def committed(self, committed: int, median_step_s: float) -> None:
        """Note that an update has been applied."""

    def step_over(self, committed: int, *, saves: bool) -> None:
        """Keep what the script has changed since its update. `saves`: a checkpoint may be written."""


class Step:
    """One step of the training loop, as `TrainState.steps` yields it.

    Attributes:
        index: Number of the step, from 0.
    """

    def __init__(self, ledger: "Ledger", index: int) -> None:
        self.index = index
        self._ledger = ledger

    def report(self, **values: SupportsFloat) -> None:
        """Report values of the step by name, for the rules of the policy: `step.report(loss=loss, grad_norm=norm)`.

        They are read at the commit barrier, so report them before the update block. A tensor of one element is not
        waited for before. Without rules in the policy they are read once a second only, behind an update, to be shown
        in `midstep status` and on the page: the first 6 with names of at most 32 characters.

        Args:
            values: Numbers, or what can be made one, by names of small letters, digits and `_`.
        """
        self._ledger.report(values)

    def inputs(self, given: Inputs) -> Inputs:
        """Take the inputs of the step: `samples, labels = step.inputs(next(batches))`.

        With `integrity.audit_steps` in the policy this rank now and then repeats a step of another one, and gets its
        inputs here, with its random numbers, buffers and values. Once in each step, with all of its micro-batches and
        before anything is computed of them. Otherwise what is given is returned as it is.

        Args:
            given: Tensors, arrays and plain values, in lists, tuples and dicts.

        Returns:
            What is given, or the same of another rank, on the same device.

        Raises:
            ProtocolViolation: The call is the second one in a step.
        """
        return self._ledger.inputs(given)

    def loading(self) -> AbstractContextManager[None]:
        """Bracket the wait for input that no DataLoader is waited for in: `with step.loading(): batch = next(stream)`.

        A rank that waits longer than others there has a slow loader, and no slow device. A `DataLoader` of torch is
        known without it.

        Returns:
            A context manager.
        """
        return self._ledger.loading()

    def update(self) -> "Update":
        """Bracket the local update: `with step.update(): optimizer.step(); scheduler.step()`.

        Entering passes the commit barrier, so every collective of the step has to come before. Inside the block no
        collective is allowed. Leaving it commits the step.

        Returns:
            A context manager, to be used once.

        Raises:
            ProtocolViolation: On entering: the step was updated before, or is not the current one.
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
        injection_points: "InjectionPoints",
        step_clock: "StepClock",
        *,
        step_state: "StepState",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._surroundings = surroundings
        self._framework = framework
        self._injection_points = injection_points
        self._step_clock = step_clock
        self._step_state = step_state
        self.order = StepOrder(step_state, surroundings)
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._began_s = 0.0
        self._own = b""  # between capture and swap
        self._shown_next_s = 0.0
        self._trailing = framework if isinstance(framework, Trailing) else None
        self._mirrored = framework if isinstance(framework, Mirrored) else None
        self._values: dict[str, list[SupportsFloat]] = {}  # that the script has reported of this step
        self._has_inputs = False  # the script has taken the inputs of the present step
        self._open: bool | None = None  # a committed step is not over yet; True: a checkpoint may follow it
        self._acts: dict[Act, Callable[[int], bool]] = {
            Act.FINISH: self._finish,
            Act.CAPTURE: self._capture,
            Act.SWAP: self._swap,
            Act.MEET: self._meet,
            Act.HOLD: lambda index: surroundings.hold_at_barrier(),
            Act.PUBLISH: self._publish,
        }
        self.median_step_s = 0.0  # of the last steps; 0 before the first

    @property
    def count(self) -> int:
        """Updates applied, so also the index of the next step."""
        return self._step_state.count

    def steps(self, total: int) -> Iterator[Step]:
        """Yield the steps that are left of `total`, from the one to be repeated."""
        step_state = self._step_state
        self._surroundings.loop_begins()
        while step_state.count < total:
            index = self.begin()
            yield Step(self, index)
            if step_state.count == index:
                raise ProtocolViolation(
                    f"step {index} ended without `with step.update():` around the optimizer's step. "
                    "Put it there, after all collectives of the step."
                )
        self.end_step()

    def report(self, values: Mapping[str, SupportsFloat], *, adds: bool = False) -> None:
        """Keep values of the present step, by name; tensors without what they were computed from.

        `adds`: to those that the step has already, of which the mean counts. Otherwise they take their place.
        """
        for name, value in values.items():
            before = self._values.get(name, []) if adds else []
            self._values[name] = [*before, getattr(value, "detach", lambda value=value: value)()]

    def inputs(self, given: Inputs) -> Inputs:
        """Return the inputs of the step. Raises ProtocolViolation for the second time in one."""
        if self._has_inputs:
            raise ProtocolViolation(
                f"step.inputs(...) is called a second time in step {self.count}: take all micro-batches of a step at "
                "once, `parts = step.inputs([next(batches) for _ in range(PARTS)])`"
            )
        self._has_inputs = True
        found: Inputs = self._surroundings.inputs(given)
        return found

    def batch(self, given: Any) -> Any:
        """Return a micro-batch of a loop that has no `step`: the one that is given, or that of another rank."""
        return self._surroundings.inputs(given)

    def computes(self, *, has_batch: bool) -> None:
        """Note that the model begins to compute; without `has_batch` some ranks get their input from others alone."""
        self._surroundings.compares(True, has_batch=has_batch)

    def computed(self) -> None:
        """Note that the gradients are reduced of all that the model has computed so far."""
        self._surroundings.compares(False)

    def reduced(self) -> None:
        """Note that all gradients of the step are reduced. Raises Interrupted at the end of a step of another rank."""
        self._surroundings.replay_ends()

    def loading(self) -> AbstractContextManager[None]:
        """Book the time of a block as a wait for input."""
        return self._step_clock.loading()

    def reported(self, only: str = "") -> dict[str, float]:
        """Return the values that were reported in this step, or one of them. Raises ConfigurationError: no number."""
        numbers = {}
        for name, values in self._values.items():
            if only not in {"", name}:
                continue
            try:
                numbers[name] = _mean(values)
            except (TypeError, ValueError, RuntimeError) as error:
                kinds = ", ".join(sorted({type(each).__name__ for each in values}))
                raise ConfigurationError(
                    f"report({name}=...) got {kinds}, which is no number: {error}. Report a number, or a tensor of one "
                    "element"
                ) from error
        return numbers

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the step clock around something that takes long in the middle of training: an evaluation, say."""
        self._step_clock.doing(Activity.PAUSED)
        try:
            yield
        finally:
            self._step_clock.doing(Activity.COMPUTING)

    def begin(self) -> int:
        """Begin the next step and return its index; for a loop that is not `steps`. Raises Interrupted."""
        self.end_step()
        index = self.order.begin()
        self._values.clear()
        self._has_inputs = False
        self._began_s = self._clock()
        self._step_clock.begin_step(index, self.median_step_s)
        if self._injection_points.armed:
            self._fire_inside(index)
        return index

    def _fire_inside(self, index: int) -> None:
        if self._injection_points.waits_for(InjectionPoint.REPLAY, index):
            fire = partial(self._injection_points.reached, InjectionPoint.REPLAY, index)
            self._framework.fire_in(InjectionPoint.FORWARD, fire)
        for point in (InjectionPoint.FORWARD, InjectionPoint.BACKWARD, InjectionPoint.REDUCTION, InjectionPoint.GATHER):
            if self._injection_points.waits_for(point, index):
                self._framework.fire_in(point, partial(self._injection_points.reached, point, index))

    def enter_update(self, index: int) -> None:
        """Pass the commit barrier of a step. Raises Interrupted when the step has to be repeated."""
        self._surroundings.replay_ends()
        end, acts = self.order.end(index), self._acts
        act = next(end)
        self._step_clock.doing(Activity.COMMITTING)
        while True:
            answer = acts[act](index)  # outside the try: a user's function may raise StopIteration itself
            try:
                act = end.send(answer)
            except StopIteration:
                break
        self._step_clock.doing(Activity.UPDATING)
        self._injection_points.reached(InjectionPoint.UPDATE, index)

    def leave_update(self, index: int) -> None:
        """Commit the step: its update is applied."""
        self._surroundings.update_done()
        goes_on = self.order.commit()
        count = self._step_state.count
        self._durations.append(self._clock() - self._began_s)
        self.median_step_s = statistics.median(self._durations)
        self._step_clock.committed(count, self.median_step_s)
        self._show_reported(count)
        # What the loop does after its update (logging, say) still runs; orders are followed before the next step.
        if goes_on:
            self._surroundings.committed(count, self.median_step_s)
        self._open = goes_on
        if self._trailing is None:
            self.end_step()
        else:
            self._trailing.update_applied()

    def _show_reported(self, count: int) -> None:
        """Have the values of a step seen in the status, once a second: to read a tensor takes some time."""
        if not self._values or self._began_s + self._durations[-1] < self._shown_next_s:
            return
        self._shown_next_s = self._clock() + SHOWN_S
        numbers = {}
        for name, values in self._values.items():
            with suppress(TypeError, ValueError, RuntimeError):  # without a rule nothing depends on it
                numbers[name] = _mean(values)
        self._step_clock.show(count, numbers)

    def end_step(self) -> None:
        """Note that the script is through with the step that was committed last. Does nothing the second time."""
        saves, self._open = self._open, None
        if saves is not None:
            self._surroundings.step_over(self._step_state.count, saves=saves)

    def abandon_step(self) -> None:
        """Note that the script was interrupted after an update: what it has changed since is not kept."""
        self._open = None

    def void_update(self) -> None:
        """End an update that was none: the step is where it was, and is committed by another one."""
        self._surroundings.update_done()
        self.order.void()
        self._step_clock.doing(Activity.COMPUTING)

    # --- the acts of a step's end -------------------------------------------------------------------------------

    def _finish(self, index: int) -> bool:
        self._surroundings.step_done()
        return True

    def _capture(self, index: int) -> bool:
        if self._mirrored is not None:
            self._mirrored.gradients_final()
        self._own = self._surroundings.keep_local(index + 1, self._framework.capture_local())
        return True

    def _swap(self, index: int) -> bool:
        own, self._own = self._own, b""
        self._injection_points.reached(InjectionPoint.BARRIER, index)
        try:
            self._surroundings.swap_local(index + 1, own)
        except CommunicatorError:  # what it holds would keep the dead step's groups alive, were it kept
            return False
        return True

    def _meet(self, index: int) -> bool:
        self._step_clock.counted(self.reported(TOKENS).get(TOKENS, 0.0))
        try:
            self._surroundings.meet(index)
        except CommunicatorError:
            return False
        return True

    def _publish(self, index: int) -> bool:
        self._surroundings.barrier_passed()
        return True


def _mean(values: Sequence[SupportsFloat]) -> float:
    """Return the mean of numbers, and of a single one the number itself. Not a number if one of them is not."""
    return sum(map(float, values)) / len(values)
