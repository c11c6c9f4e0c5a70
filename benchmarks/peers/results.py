"""All trials of a comparison in one file, written whole after each, so that it can be stopped and go on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .course import Course
from .kinds import Trial
from .outcome import Outcome


class Attempt(msgspec.Struct, frozen=True):
    """One trial that was run; where it did not recover `why` says what was seen.

    `outcome`: of one fault or none; `course`: under a schedule, also of a run that gave up.
    """

    trial: Trial
    foreign_cores: float
    outcome: Outcome | None = None
    why: str = ""
    course: Course | None = None


class Results(msgspec.Struct):
    """The findings of a comparison so far."""

    machine: dict[str, Any]
    attempts: list[Attempt] = []
    not_installed: dict[str, str] = {}  # peer: why

    def of(self, *, scheduled: bool) -> "Results":
        """Return the same with the attempts under schedules only, or without them."""
        attempts = [each for each in self.attempts if (each.trial.drawn is not None) is scheduled]
        return msgspec.structs.replace(self, attempts=attempts)

    def done(self, trial: Trial) -> list[Attempt]:
        """Return the attempts of a trial."""
        return [attempt for attempt in self.attempts if attempt.trial == trial]

    def left(self, trials: Sequence[Trial], repeat: int) -> Iterator[Trial]:
        """Yield what is still to be run: all trials in turn, again and again, so that all see the same weather."""
        counts = {trial: len(self.done(trial)) for trial in trials}
        for number in range(repeat):
            yield from (trial for trial in trials if counts[trial] <= number)


def load(path: Path | None, machine: dict[str, Any]) -> Results:
    """Read what an earlier run has found, if it has."""
    if path is None or not path.exists():
        return Results(machine)
    return msgspec.json.decode(path.read_bytes(), type=Results)


def save(results: Results, path: Path | None) -> None:
    """Write all of it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        draft.rename(path)
