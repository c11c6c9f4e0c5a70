"""How much of a step its copies take, measured in the first steps and said once; and how it is said."""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_STEPS = 10  # that are measured, after one that warms up


class CopyTimes:
    """The time that the train thread spends on copies, for each thing that it does for them."""

    def __init__(self, what: tuple[str, ...]) -> None:
        self._seconds: dict[str, list[float]] = {name: [] for name in what}
        self._ends: list[float] = []
        self._told = False

    @contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Measure a part of a step. Where a device works behind the thread's back its work is not seen here."""
        began_s = time.perf_counter()
        yield
        if not self._told:
            self._seconds[name].append(time.perf_counter() - began_s)

    def step_done(self) -> None:
        """A step's copies are made; after the last step that is measured say what they took."""
        if self._told:
            return
        self._ends.append(time.perf_counter())
        if len(self._ends) <= _STEPS:
            return
        self._told = True
        steps_s = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        told = ", ".join(f"{statistics.median(taken[1:]) * 1e3:.1f} ms for {n}" for n, taken in self._seconds.items())
        say(f"copies take of a step of {statistics.median(steps_s) * 1e3:.1f} ms: {told} (medians of {_STEPS})")


def say(text: str) -> None:
    """Print a line in this rank's log, whatever the script has made of logging."""
    sys.stderr.write(f"midstep: {text}\n")
    sys.stderr.flush()
