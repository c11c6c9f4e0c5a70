"""Compare a figure with its noise. Pure: two records in, a movement for each figure out."""

import enum

import msgspec

from .record import Better, Figure, Record

LEAST_MOVE = 0.02  # of the old median: less is no news, however quiet it was
QUIET_CORES = 0.2  # that other programs may use where a value without a yardstick is judged
COMPARED = ("cores", "python", "torch")  # what makes a machine the same


class Verdict(enum.Enum):
    """The change of a figure."""

    WORSE = "worse"
    BETTER = "better"
    WITHIN_NOISE = "within noise"
    NOT_JUDGED = "not judged"
    NEW = "new"
    GONE = "gone"


class Movement(msgspec.Struct, frozen=True):
    """One figure of two records; `ratio` is the new median to the old one."""

    name: str
    verdict: Verdict
    old: Figure | None = None
    new: Figure | None = None
    ratio: float = 0.0


def compare(old: Record, new: Record) -> list[Movement]:
    """Compare each figure. What only one of the two has is said as well."""
    before, after = ({figure.name: figure for figure in record.figures} for record in (old, new))
    comparable = _comparable(old, new)
    movements = []
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name), after.get(name)
        if was is None or now is None:
            movements.append(Movement(name, Verdict.NEW if was is None else Verdict.GONE, was, now))
            continue
        judged = comparable or (was.yardstick and now.yardstick)
        verdict = verdict_of(was, now) if judged else Verdict.NOT_JUDGED
        movements.append(Movement(name, verdict, was, now, now.median / was.median if was.median else 0.0))
    return movements


def verdict_of(old: Figure, new: Figure) -> Verdict:
    """Judge one figure: it has moved if no repetition of one day is among those of the other, by more than a trifle."""
    if old.least <= new.greatest and new.least <= old.greatest:
        return Verdict.WITHIN_NOISE
    if abs(new.median - old.median) <= LEAST_MOVE * abs(old.median):
        return Verdict.WITHIN_NOISE
    return Verdict.WORSE if (new.median > old.median) is (new.better is Better.LOWER) else Verdict.BETTER


def got_worse(movements: list[Movement]) -> bool:
    """Say whether anything has."""
    return any(movement.verdict is Verdict.WORSE for movement in movements)


def _comparable(old: Record, new: Record) -> bool:
    """Say whether values without a yardstick can be compared: the same machine, and quiet both times."""
    same = all(old.machine.get(key) == new.machine.get(key) for key in COMPARED)
    return same and max(old.foreign_cores, new.foreign_cores) <= QUIET_CORES
