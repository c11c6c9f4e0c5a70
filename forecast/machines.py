"""The machines of a forecast's cluster: how many are whole, and when those that broke are repaired."""

import bisect


class Machines:
    """All machines that a job could have. Times are seconds since the start of the forecast."""

    def __init__(self, count: int, repair_s: float) -> None:
        self._count = count
        self._repair_s = repair_s
        self._repaired_s: list[float] = []  # when each that broke is whole again, in order

    def break_one(self, now: float) -> None:
        """A machine has broken, and is on its way to be repaired."""
        bisect.insort(self._repaired_s, now + self._repair_s)

    def whole(self, now: float) -> int:
        """Return how many can be used."""
        return self._count - len(self.to_come(now))

    def to_come(self, now: float) -> list[float]:
        """Return when each of those that are broken now will be whole again."""
        return [at_s for at_s in self._repaired_s if at_s > now][: self._count]

    def enough_at(self, needed: int, now: float) -> float:
        """Return when so many can be used: now, or when the last of them is repaired."""
        missing = needed - self.whole(now)
        return self.to_come(now)[missing - 1] if missing > 0 else now
