"""Time in which this process itself ran. A process that watches others by the clock must not count its own pauses.

Pure: the clock's reading is an argument.
"""

TICK_S = 1.0  # ask at least this often
_GAP_S = 2 * TICK_S  # after a longer time than this the process stood still


class RunningTime:
    """A clock that stands still while its process is stopped or starved, together with the machine or alone."""

    def __init__(self, clock_s: float) -> None:
        self._last_s = clock_s
        self._ran_s = 0.0

    def at(self, clock_s: float) -> float:
        """Return the time now, which `clock_s` reads. A gap since the last call counts as one tick."""
        gap_s = clock_s - self._last_s
        self._last_s = clock_s
        self._ran_s += TICK_S if gap_s > _GAP_S else max(gap_s, 0.0)
        return self._ran_s
