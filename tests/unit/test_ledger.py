"""The step ledger: the order that makes a step consistent, and where it may be interrupted."""

import math
from collections.abc import Callable
from typing import cast

import pytest

from midstep.processor.framework import Framework
from midstep.processor.injection_points import InjectionPoints
from midstep.processor.ledger import HISTORY_STEPS, Ledger, Step, Surroundings
from midstep.processor.step_clock import StepClock
from midstep.processor.step_order import StepState
from midstep.protocol.blackbox import BlackBox
from midstep.protocol.errors import CommunicatorAborted, InjectedFault, Interrupted, ProtocolViolation
from midstep.protocol.types import Activity, ArmedFault, FaultAction, InjectionPoint, RankProgress


class Journey(Surroundings):
    """Surroundings and framework in one, writing down what the ledger does, in order."""

    def __init__(self) -> None:
        self.went: list[str] = []
        self.stop = False
        self.boundary: int | None = None
        self.swap_breaks = self.barrier_breaks = False
        self.finish_update = False
        self.device_fails_in = ""
        self.step_state = StepState(clean=True)

    def interrupted(self) -> bool:
        return self.stop

    def step_done(self) -> None:
        if self.device_fails_in == "step":
            raise RuntimeError("UCE ERROR")

    def update_done(self) -> None:
        if self.device_fails_in == "update":
            raise RuntimeError("UCE ERROR")

    def begins(self, step: int) -> bool:
        return step != self.boundary

    def keep_local(self, step: int, blob: bytes) -> bytes:
        self.went.append(f"keep {step} {blob.decode()} ready={self.step_state.ready}")
        return blob

    def swap_local(self, step: int, blob: bytes) -> None:
        self.went.append(f"swap {step} {blob.decode()} ready={self.step_state.ready}")
        if self.swap_breaks:
            raise CommunicatorAborted("the buddy is gone")

    def meet(self, index: int) -> None:
        self.went.append(f"meet at {index}")
        if self.barrier_breaks:
            raise CommunicatorAborted("a peer is gone")

    def hold_at_barrier(self) -> bool:
        self.went.append(f"hold at {self.step_state.count} ready={self.step_state.ready}")
        return self.finish_update

    def committed(self, committed: int, median_step_s: float) -> None:
        self.went.append(f"committed {committed}")

    def step_over(self, committed: int, *, saves: bool) -> None:
        self.went.append(f"over {committed} saves={saves}")

    def barrier_passed(self) -> None:
        self.went.append("passed")

    def capture_local(self) -> bytes:
        self.went.append("capture")
        return b"own"

    def fire_in(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        self.went.append(f"armed in {point}")
        fire()


def ledger_of(journey: Journey, *armed: ArmedFault, clock: Callable[[], float] = lambda: 0.0) -> Ledger:
    """A ledger without a black box."""
    injection_points = InjectionPoints(0, 1, armed)
    framework = cast(Framework, journey)
    step_clock = StepClock(None, injection_points, 1)
    return Ledger(journey, framework, injection_points, step_clock, step_state=journey.step_state, clock=clock)


@pytest.fixture
def journey() -> Journey:
    """What happens, in order."""
    return Journey()


def test_a_step_ends_in_one_order(journey: Journey) -> None:
    """Rank-local state, ready and the barrier, the local update, committed."""
    ledger = ledger_of(journey)
    for step in ledger.steps(1):
        with step.update():
            journey.went.append(f"update, count {ledger.count}, updating {journey.step_state.updating}")
    assert journey.went == [
        "capture",
        "keep 1 own ready=False",
        "swap 1 own ready=True",
        "meet at 0",
        "passed",
        "update, count 0, updating True",
        "committed 1",
        "over 1 saves=True",
    ]
    assert (ledger.count, journey.step_state.ready, journey.step_state.updating) == (1, False, False)


class Trailing(Journey):
    """A framework with values that the script may change after its update."""

    def update_applied(self) -> None:
        self.went.append("applied")

    def capture_trailing(self) -> bytes | None:
        return None

    def restore_trailing(self, blob: bytes) -> None: ...


def test_a_step_is_over_when_the_script_asks_for_the_next_one() -> None:
    """What it changes after its update block belongs to the step that was committed; also that of the last step."""
    journey = Trailing()
    for step in ledger_of(journey).steps(2):
        with step.update():
            pass
        journey.went.append(f"after {step.index}")
    ends = [each for each in journey.went if each.partition(" ")[0] in {"applied", "after", "over"}]
    assert ends == ["applied", "after 0", "over 1 saves=True", "applied", "after 1", "over 2 saves=True"]


def test_a_step_that_was_applied_for_the_sake_of_others_is_over_before_the_loop_is_left() -> None:
    """Its values are kept as well, and no checkpoint is written: orders are waiting."""
    journey = Trailing()
    journey.barrier_breaks = journey.finish_update = True
    with pytest.raises(Interrupted):
        _run(ledger_of(journey), 5)
    assert journey.went[-2:] == ["applied", "over 1 saves=False"]


def test_what_is_reported_is_read_once_a_second_to_be_shown(journey: Journey) -> None:
    """And without a rule it may be what it will: a value that is no number is left out."""
    seconds = iter(number / 4 for number in range(1000))
    box, read = BlackBox.create(0, 256), []

    class Costly:
        def __float__(self) -> float:
            read.append(1)
            return 2.5

    step_clock = StepClock(box, InjectionPoints(0, 1, ()), 1)
    ledger = Ledger(
        journey,
        cast(Framework, journey),
        InjectionPoints(0, 1, ()),
        step_clock,
        step_state=journey.step_state,
        clock=lambda: next(seconds),
    )
    for step in ledger.steps(20):
        step.report(loss=Costly(), note=cast(float, "no number"))
        with step.update():
            pass
    told = box.read_reported()
    box.close()
    assert told is not None
    assert told.values == {"loss": 2.5}
    assert 3 < len(read) < 12


def test_of_a_value_of_each_micro_batch_the_mean_counts(journey: Journey) -> None:
    """One that is no number shows, whichever it is; `step.report` takes the place of what was reported before."""
    ledger = ledger_of(journey)
    for step in ledger.steps(2):
        step.report(norm=7.0)
        step.report(norm=2.0)
        for loss in (1.0, 4.0, math.nan)[: 2 + step.index]:
            ledger.report({"loss": loss}, adds=True)
        reported = ledger.reported()
        assert reported["norm"] == 2.0
        assert reported["loss"] == 2.5 if step.index == 0 else math.isnan(reported["loss"])
        with step.update():
            pass


def test_all_steps_are_counted(journey: Journey) -> None:
    """Indices run from 0, and the loop ends at the total."""
    ledger = ledger_of(journey)
    seen = []
    for step in ledger.steps(3):
        seen.append(step.index)
        with step.update():
            pass
    assert seen == [0, 1, 2]
    assert ledger.count == 3


def test_a_broken_barrier_holds_and_repeats_the_step(journey: Journey) -> None:
    """Where nobody has committed, the update is not applied; the rank still says that it was ready."""
    ledger = ledger_of(journey)
    journey.barrier_breaks = True
    with pytest.raises(Interrupted):
        ledger.enter_update(0)
    assert journey.went[-1] == "hold at 0 ready=True"
    assert (ledger.count, journey.step_state.updating) == (0, False)


def test_a_swap_that_breaks_meets_nobody_and_holds(journey: Journey) -> None:
    """Without the ward's local state here no barrier is entered, so that nobody can commit."""
    ledger = ledger_of(journey)
    journey.swap_breaks = True
    with pytest.raises(Interrupted):
        ledger.enter_update(0)
    assert journey.went[-2:] == ["swap 1 own ready=True", "hold at 0 ready=True"]


def test_a_capture_that_raises_whatever_it_raises_begins_no_update(journey: Journey) -> None:
    """Also what generators use to say that there is no more: users register functions that are called here."""

    def capture_local() -> bytes:
        return next(iter(()))

    ledger = ledger_of(journey)
    journey.capture_local = capture_local  # type: ignore[method-assign]
    with pytest.raises(StopIteration):
        ledger.enter_update(0)
    assert (journey.step_state.ready, journey.step_state.updating) == (False, False)


def test_a_broken_barrier_can_finish_the_update(journey: Journey) -> None:
    """Where somebody has committed, the update is applied, not reported as a new step, and then the loop is left."""
    ledger = ledger_of(journey)
    journey.barrier_breaks = journey.finish_update = True
    after: list[int] = []
    with pytest.raises(Interrupted):
        _run(ledger, 5, update=lambda: journey.went.append("update"), after=after.append)
    assert after == [0]
    assert journey.went[-3:] == ["hold at 0 ready=True", "update", "over 1 saves=False"]
    assert (ledger.count, journey.step_state.ready, ledger.order.held) == (1, False, True)


def test_the_last_step_finished_at_a_broken_barrier_ends_the_loop(journey: Journey) -> None:
    """There is no next step to be interrupted at; the orders are followed by whoever called the loop."""
    ledger = ledger_of(journey)
    journey.barrier_breaks = journey.finish_update = True
    for step in ledger.steps(1):
        with step.update():
            pass
    assert ledger.count == 1
    assert ledger.order.held


def test_an_interruption_before_the_step_does_not_begin_it(journey: Journey) -> None:
    """The train function is left between two steps."""
    ledger = ledger_of(journey)
    journey.stop = True
    with pytest.raises(Interrupted):
        next(ledger.steps(1))
    assert journey.went == []


def test_an_interruption_before_the_barrier_does_not_enter_it(journey: Journey) -> None:
    """A rank that is asked to stop while it computes is not ready."""
    ledger = ledger_of(journey)
    step = next(ledger.steps(1))
    journey.stop = True
    with pytest.raises(Interrupted), step.update():
        journey.went.append("update")
    assert journey.went == []
    assert not journey.step_state.ready


def test_an_interruption_in_the_update_lets_it_finish(journey: Journey) -> None:
    """There is never half an update: the loop is left before the next step."""
    ledger = ledger_of(journey)
    with pytest.raises(Interrupted):
        _run(ledger, 3, update=lambda: setattr(journey, "stop", True))
    assert ledger.count == 1
    assert journey.went[-2:] == ["committed 1", "over 1 saves=True"]


def test_an_update_that_raises_commits_nothing(journey: Journey) -> None:
    """The user's exception goes on, and the step is not counted."""
    ledger = ledger_of(journey)
    step = next(ledger.steps(1))
    with pytest.raises(ValueError, match="nan"), step.update():
        raise ValueError("nan")
    assert ledger.count == 0
    assert "committed 1" not in journey.went


def test_a_reset_ledger_goes_on_at_the_interrupted_index(journey: Journey) -> None:
    """After the rollback the step is begun again, by its index."""
    ledger = ledger_of(journey)
    journey.stop = True
    ledger.order.rolled_back(4)
    journey.stop = False
    assert [step.index for step in _run(ledger, 6)] == [4, 5]


def test_a_reset_forgets_the_interrupted_step(journey: Journey) -> None:
    """Neither final gradients nor waiting orders outlive the rollback."""
    ledger = ledger_of(journey)
    journey.barrier_breaks = journey.finish_update = True
    ledger.enter_update(0)
    ledger.leave_update(0)
    ledger.order.rolled_back(1)
    step_state = journey.step_state
    assert (step_state.count, step_state.ready, step_state.updating, ledger.order.held) == (1, False, False, False)


def test_a_step_without_an_update_is_a_violation(journey: Journey) -> None:
    """The text says what to put where."""
    ledger = ledger_of(journey)
    with pytest.raises(ProtocolViolation, match=r"step 0 ended without `with step.update\(\):`"):
        for _ in ledger.steps(2):
            pass


def test_a_step_updated_twice_is_a_violation(journey: Journey) -> None:
    """The second time is named with where the ledger stands."""
    ledger = ledger_of(journey)
    step = next(ledger.steps(2))
    with step.update():
        pass
    again = pytest.raises(ProtocolViolation, match=r"step 0 is updated a second time, or out of turn \(at 1\)")
    with again, step.update():
        pass


def test_the_median_is_of_the_last_steps_only(journey: Journey) -> None:
    """Steps of long ago do not count; before the first it is 0."""
    times = iter(float(number) for number in range(10_000))
    ledger = ledger_of(journey, clock=lambda: next(times))
    assert ledger.median_step_s == 0.0
    for _ in _run(ledger, HISTORY_STEPS + 5):
        pass
    assert ledger.median_step_s == 1.0


@pytest.mark.parametrize(
    ("point", "last"), [(InjectionPoint.BARRIER, "keep 1 own ready=False"), (InjectionPoint.UPDATE, "passed")]
)
def test_a_fault_armed_in_the_ledger_comes_at_its_injection_point(
    journey: Journey, point: InjectionPoint, last: str
) -> None:
    """At the barrier before it is entered, at the update after it was passed."""
    ledger = ledger_of(journey, ArmedFault(0, FaultAction.RAISE, point, step=0))
    with pytest.raises(InjectedFault):
        ledger.enter_update(0)
    assert journey.went[-1] == last


@pytest.mark.parametrize("point", [InjectionPoint.FORWARD, InjectionPoint.BACKWARD])
def test_a_fault_in_a_pass_is_handed_to_the_framework(journey: Journey, point: InjectionPoint) -> None:
    """Only in the step that it is armed for."""
    ledger = ledger_of(journey, ArmedFault(0, FaultAction.RAISE, point, step=1))
    with pytest.raises(InjectedFault, match=f"injected at {point} of step 1 in rank 0"):
        for _ in _run(ledger, 3):
            pass
    assert journey.went[-1] == f"armed in {point}"
    assert ledger.count == 1


def _run(
    ledger: Ledger,
    total: int,
    update: Callable[[], object] = lambda: None,
    after: Callable[[int], object] = lambda index: None,
) -> list[Step]:
    """Go through the loop as a train function does."""
    done = []
    for step in ledger.steps(total):
        done.append(step)
        with step.update():
            update()
        after(step.index)
    return done


def test_the_clock_goes_on_after_a_pause_that_raised(journey: Journey) -> None:
    """An evaluation that fails, and is caught, leaves no announced pause behind."""
    injection_points, box = InjectionPoints(1, 1), BlackBox.create(1, 4096)
    clock = StepClock(box, injection_points, 1)
    ledger = Ledger(journey, journey, injection_points, clock, step_state=journey.step_state)  # type: ignore[arg-type]

    def evaluate() -> None:
        with ledger.paused():
            seen.append(box.read_progress(0.0))
            raise ValueError("bad batch")

    seen: list[RankProgress | None] = []
    with pytest.raises(ValueError, match="bad batch"):
        evaluate()
    seen.append(box.read_progress(0.0))
    box.close()

    paused, after = seen
    assert paused is not None
    assert paused.activity is Activity.PAUSED
    assert after is not None
    assert after.activity is Activity.COMPUTING


def test_a_step_is_not_ready_before_the_device_has_done_it(journey: Journey) -> None:
    """What a device has queued may still fail; then the gradients are not final, and nothing is promised to others."""
    ledger = ledger_of(journey)
    journey.device_fails_in = "step"
    with pytest.raises(RuntimeError, match="UCE"):
        ledger.enter_update(0)
    assert (journey.step_state.ready, journey.step_state.updating, journey.went) == (False, False, [])


def test_an_update_is_not_committed_before_the_device_has_done_it(journey: Journey) -> None:
    """An update that fails on the device is half an update, and known to be."""
    ledger = ledger_of(journey)
    journey.device_fails_in = "update"
    ledger.enter_update(0)
    with pytest.raises(RuntimeError, match="UCE"):
        ledger.leave_update(0)
    assert (ledger.count, journey.step_state.updating) == (0, True)


def test_a_boundary_is_left_between_two_steps(journey: Journey) -> None:
    """The step before it is committed as usual, nothing of the next one is begun."""
    ledger = ledger_of(journey)
    journey.boundary = 2
    with pytest.raises(Interrupted):
        _run(ledger, 5)
    assert (ledger.count, journey.step_state.ready) == (2, False)
    assert journey.went[-2:] == ["committed 2", "over 2 saves=True"]


def test_inputs_are_taken_once_in_a_step(journey: Journey) -> None:
    """As they are, where no other rank's step is repeated."""
    ledger = ledger_of(journey)
    for step in ledger.steps(2):
        assert step.inputs([step.index]) == [step.index]
        with pytest.raises(ProtocolViolation, match="take all micro-batches"):
            step.inputs([])
        with step.update():
            pass


def test_a_step_that_is_repeated_for_another_rank_ends_before_its_barrier(journey: Journey) -> None:
    """Nothing of it is kept, and it is not ready."""

    def replay_ends() -> None:
        raise Interrupted

    journey.replay_ends = replay_ends  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        next(ledger_of(journey).steps(1)).update().__enter__()
    assert (journey.went, journey.step_state.ready) == ([], False)
