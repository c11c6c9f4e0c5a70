"""How long to wait before a process that has ended is started again. Pure: times and chance are arguments."""

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """Waits that double from `first_s` to `longest_s`. One that lived for `reset_s` begins a new row."""

    first_s: float = 0.1
    longest_s: float = 30.0
    reset_s: float = 10.0


class RestartBackoff:
    """Counts the deaths of one process in a row."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.deaths = 0

    def delay_s(self, lived_s: float, chance: float) -> float:
        """Return how long to wait now that a process has ended that lived for `lived_s`.

        `chance`, from 0 to 1, spreads the wait over its upper half, so that many processes do not retry at once.
        """
        if lived_s >= self._backoff.reset_s:
            self.deaths = 0
        wait_s = min(self._backoff.first_s * 2.0 ** min(self.deaths, 60), self._backoff.longest_s)
        self.deaths += 1
        return wait_s * (0.5 + 0.5 * chance)
