"""Each lifecycle callback can be replaced alone, has the default at hand, and is named when it fails."""

from collections.abc import Callable

import pytest

from midstep import Lifecycle, Recovery
from midstep.processor.callbacks import Callbacks
from midstep.protocol.errors import CallbackFailed, CommunicatorAborted, LinkUpFailed
from midstep.protocol.types import InjectionPoint

PHASES = (
    InjectionPoint.STOP,
    InjectionPoint.CLEAN,
    InjectionPoint.REBUILD,
    InjectionPoint.REPAIR,
    InjectionPoint.ROLLBACK,
)


def run(lifecycle: Lifecycle | None, phase: InjectionPoint, default: Callable[[], None]) -> None:
    Callbacks(2, lifecycle, lambda: 7).run(phase, 3, default)


@pytest.mark.parametrize("phase", PHASES)
def test_without_a_callback_the_default_runs(phase: InjectionPoint) -> None:
    done: list[str] = []
    run(None, phase, lambda: done.append("default"))
    assert done == ["default"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_callback_stands_in_for_its_own_phase_alone(phase: InjectionPoint) -> None:
    """The one that is replaced does without the default, which it did not call; the other four are midstep's."""
    done: list[str] = []
    lifecycle = Lifecycle(**{phase.value: lambda recovery: done.append("mine")})
    for each in PHASES:
        run(lifecycle, each, lambda: done.append("default"))
    assert done.count("mine") == 1
    assert done.index("mine") == PHASES.index(phase)
    assert done.count("default") == 4


def test_a_callback_can_do_something_before_and_after_the_default() -> None:
    done: list[str] = []

    def around(recovery: Recovery) -> None:
        done.append("before")
        recovery.default()
        done.append("after")

    run(Lifecycle(rollback=around), InjectionPoint.ROLLBACK, lambda: done.append("default"))
    assert done == ["before", "default", "after"]


def test_a_callback_is_told_where_the_recovery_stands() -> None:
    """The step is where this rank stands, until all know where they resume."""
    told: list[Recovery] = []
    callbacks = Callbacks(2, Lifecycle(stop=told.append, rollback=told.append), lambda: 7)
    callbacks.run(InjectionPoint.STOP, 3, lambda: None)
    callbacks.run(InjectionPoint.ROLLBACK, 4, lambda: None, step=6)
    assert [(each.phase, each.rank, each.generation, each.step) for each in told] == [
        (InjectionPoint.STOP, 2, 3, 7),
        (InjectionPoint.ROLLBACK, 2, 4, 6),
    ]


def test_an_exception_of_a_callback_carries_its_name_and_phase() -> None:
    def my_repair(recovery: Recovery) -> None:
        raise KeyError("weights")

    with pytest.raises(CallbackFailed, match=r"my_repair of repair raised KeyError: 'weights'") as caught:
        run(Lifecycle(repair=my_repair), InjectionPoint.REPAIR, lambda: None)
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_the_default_raises_passes_through_as_it_is() -> None:
    """A link that did not come up is no fault of the callback that called the default."""

    def fail() -> None:
        raise LinkUpFailed("not up")

    with pytest.raises(LinkUpFailed):
        run(Lifecycle(rebuild=lambda recovery: recovery.default()), InjectionPoint.REBUILD, fail)


def test_what_the_default_raises_cannot_be_swallowed() -> None:
    def swallow(recovery: Recovery) -> None:
        try:
            recovery.default()
        except RuntimeError:
            raise ValueError("something else") from None

    def fail() -> None:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        run(Lifecycle(clean=swallow), InjectionPoint.CLEAN, fail)


def test_an_abort_inside_a_callback_is_no_fault_of_its_own() -> None:
    """A collective of the callback's own is aborted when the next generation is opened."""

    def collect(recovery: Recovery) -> None:
        raise CommunicatorAborted("generation 5 is being opened")

    with pytest.raises(CommunicatorAborted):
        run(Lifecycle(rollback=collect), InjectionPoint.ROLLBACK, lambda: None)


def test_the_default_runs_once_in_a_callback() -> None:
    """Other ranks take part in it, and would wait for a second time in vain."""
    done: list[str] = []

    def twice(recovery: Recovery) -> None:
        recovery.default()
        recovery.default()

    with pytest.raises(CallbackFailed, match="called a second time"):
        run(Lifecycle(repair=twice), InjectionPoint.REPAIR, lambda: done.append("default"))
    assert done == ["default"]
