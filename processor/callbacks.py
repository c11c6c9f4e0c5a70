"""The five callbacks of a recovery, each of which a user can replace alone: stop, clean, rebuild, repair, rollback.

midstep has a default for each. A callback of the user's stands in its place and can call it, before, after or between
what it does itself. What only the recovery knows (where a rank stands, what it holds, what it has reported to the
controller) is kept around the callback and not in it, so that a replacement cannot lose it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.errors import CallbackFailed, MidstepError
from ..protocol.types import InjectionPoint


@dataclass(frozen=True)
class Recovery:
    """The argument of a lifecycle callback.

    Attributes:
        phase: Which of the five callbacks is called.
        rank: The rank of this process.
        generation: The generation of the world as far as this process knows; from rebuild on the new one.
        step: In stop and clean the updates that this rank has committed; from rebuild on those with which all resume.
        default: Does what midstep would have done. Call it at most once.
    """

    phase: InjectionPoint
    rank: int
    generation: int
    step: int
    default: Callable[[], None]


Callback = Callable[[Recovery], None]


@dataclass(frozen=True)
class Lifecycle:
    """Callbacks in place of midstep's own, for `midstep.resilient(state, lifecycle=...)`; None: midstep's own.

    They run in the train thread, in this order, except for `stop`. A callback that calls `recovery.default()` adds to
    midstep's own; one that does not replaces it. An exception in a callback is a fault of this rank, reported with the
    callback's name and phase. What `default` raises is raised again if the callback swallows it.

    Attributes:
        stop: End what is in flight, so that the train thread returns from whatever it waits for. midstep's own aborts
            the collectives and the device's work. It runs in the thread that hears of the fault first, which may be
            the control thread while the train thread computes, and a second time in the train thread. Never during an
            update. Must not wait for the train thread.
        clean: Drop what an interrupted step has left. midstep's own asks the device what became of its memory, restarts
            it, and drops reducers and handles.
        rebuild: Connect to the world of the new generation. midstep's own connects all process groups, in place.
        repair: Bring lost state back. midstep's own copies shards between ranks, or loads a checkpoint. All ranks run
            it. Without a callback here or for rebuild the shards move while the groups are connected, and midstep's own
            waits for what is left of them.
        rollback: Put everything back to `step`. midstep's own puts back random numbers, data positions, buffers and
            values, and drops gradients. All ranks run it, also those that lost nothing.
    """

    stop: Callback | None = None
    clean: Callback | None = None
    rebuild: Callback | None = None
    repair: Callback | None = None
    rollback: Callback | None = None


class Callbacks:
    """Runs the callbacks of one rank. Any thread."""

    def __init__(self, rank: int, lifecycle: Lifecycle | None = None, committed: Callable[[], int] = int) -> None:
        self._rank = rank
        self._lifecycle = lifecycle or Lifecycle()
        self._committed = committed

    def replaced(self, phase: InjectionPoint) -> bool:
        """Return whether the script has a callback for a phase, in place of midstep's own."""
        return getattr(self._lifecycle, phase.value) is not None

    def run(self, phase: InjectionPoint, generation: int, default: Callable[[], None], step: int | None = None) -> None:
        """Run the user's callback of a phase, or else `default`. `step` None: where this rank stands.

        Raises CallbackFailed for an exception of the user's, and whatever `default` raises.
        """
        callback: Callback | None = getattr(self._lifecycle, phase.value)
        if callback is None:
            default()
            return
        own = _Default(default)
        try:
            callback(Recovery(phase, self._rank, generation, self._committed() if step is None else step, own))
        except Exception as error:
            if own.error is None and not isinstance(error, MidstepError):
                raise CallbackFailed(
                    f"the callback {_name(callback)} of {phase} raised {type(error).__name__}: {error}"
                ) from error
            if own.error is None:  # a collective of the callback's own that was aborted, say
                raise
        if own.error is not None:
            raise own.error


class _Default:
    """The default of one call: remembers whether it was called, and what it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._called = False
        self.error: Exception | None = None

    def __call__(self) -> None:
        """Do it. Raises RuntimeError the second time: other ranks take part in some of it, and would not know."""
        if self._called:
            raise RuntimeError("recovery.default() was called a second time")
        self._called = True
        try:
            self._call()
        except Exception as error:
            self.error = error
            raise


def _name(callback: Callback) -> str:
    return str(getattr(callback, "__qualname__", None) or callback)
