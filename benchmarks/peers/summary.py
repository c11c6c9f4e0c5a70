"""Sum up many attempts of one trial. Pure: attempts in, rows of the table out."""

import enum
import statistics
from collections.abc import Collection, Sequence

import msgspec

from .kinds import Fault, Trial
from .outcome import Outcome
from .results import Attempt

PLAIN = "plain"
OURS = "midstep"


class Bits(enum.Enum):
    """The comparison of the last parameters with those of an undisturbed run."""

    EQUAL = "equal"
    OTHER = "other"
    UNKNOWN = "not compared"


class Spread(msgspec.Struct, frozen=True):
    """Median, least and greatest."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.greatest:.2f})"


class Row(msgspec.Struct, frozen=True):
    """One trial, with all its attempts. The spreads are of those that recovered."""

    trial: Trial
    recovered: int
    attempts: int
    why: str = ""  # it was not tried, or the last failure
    recovery_s: Spread | None = None
    excess_s: Spread | None = None
    wall_lost_s: Spread | None = None
    steps_repeated: int = 0
    processes_restarted: int = 0
    world: int = 0  # the smallest afterwards
    bits: Bits = Bits.UNKNOWN


class StepRow(msgspec.Struct, frozen=True):
    """The cost of a step with a peer while nothing happens, next to a plain run's in the same round."""

    trial: Trial
    step_s: Spread
    ratio: Spread


def row_of(trial: Trial, attempts: Sequence[Attempt], digests: Collection[str], cannot: str = "") -> Row:
    """Sum up the attempts of a trial with a fault. `digests` are those of runs of the same size without one."""
    outcomes = [attempt.outcome for attempt in attempts if attempt.outcome is not None]
    failures = [attempt.why for attempt in attempts if attempt.outcome is None]
    why = cannot or (failures[-1].splitlines()[0] if failures else "")
    if not outcomes:
        return Row(trial, 0, len(attempts), why or "not run")
    return Row(
        trial,
        len(outcomes),
        len(attempts),
        why,
        spread([outcome.recovery_s for outcome in outcomes]),
        spread([outcome.excess_s for outcome in outcomes]),
        spread([outcome.wall_lost_s for outcome in outcomes]),
        max(outcome.steps_repeated for outcome in outcomes),
        max(outcome.processes_restarted for outcome in outcomes),
        min(outcome.world for outcome in outcomes),
        _bits(outcomes, digests),
    )


def undisturbed_digests(attempts: Sequence[Attempt], peer: str, ranks: int) -> set[str]:
    """Return what a peer and a plain run come to in a world of this size when nothing happens."""
    return {
        attempt.outcome.digest
        for attempt in attempts
        if attempt.outcome is not None
        and attempt.trial.fault is Fault.NONE
        and attempt.trial.ranks == ranks
        and (attempt.trial.peer == peer or attempt.trial.tool == PLAIN)
    }


def step_rows(attempts: Sequence[Attempt]) -> list[StepRow]:
    """Sum up the attempts without a fault, each beside the plain one of the same round."""
    undisturbed = [each for each in attempts if each.trial.fault is Fault.NONE]
    plain = {each.trial.ranks: _steps(attempts, each.trial) for each in undisturbed if each.trial.tool == PLAIN}
    rows = []
    for trial in dict.fromkeys(each.trial for each in undisturbed):
        steps = _steps(attempts, trial)
        ratios = [own / other for own, other in zip(steps, plain.get(trial.ranks, ()), strict=False)]
        if ratios:
            rows.append(StepRow(trial, spread(steps), spread(ratios)))
    return rows


def best_of_others(rows: Sequence[Row], fault: Fault, ranks: int) -> Row | None:
    """Return the quickest row of another tool after which the world was whole, whatever its setting."""
    whole = [
        row
        for row in rows
        if (row.trial.fault, row.trial.ranks, row.world) == (fault, ranks, ranks) and row.trial.tool != OURS
    ]
    return min(whole, key=excess, default=None)


def excess(row: Row) -> float:
    """Return what rows are ordered by."""
    return float("inf") if row.excess_s is None else row.excess_s.median


def spread(values: Sequence[float]) -> Spread:
    """Return median, least and greatest."""
    return Spread(statistics.median(values), min(values), max(values))


def _bits(outcomes: Sequence[Outcome], digests: Collection[str]) -> Bits:
    if not digests:
        return Bits.UNKNOWN
    return Bits.EQUAL if all(outcome.digest in digests for outcome in outcomes) else Bits.OTHER


def _steps(attempts: Sequence[Attempt], trial: Trial) -> list[float]:
    return [each.outcome.step_s for each in attempts if each.trial == trial and each.outcome is not None]
