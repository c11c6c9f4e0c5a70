"""When a leader's lease has ended, for those that stand by: etcd notices it up to half a second late.

etcd says how long a lease lasts in whole seconds, rounded down. From the first time on that it says none, the lease has
less than a second; when a second has passed by the own clock, and it still says none, the lease is over. That etcd has
not ended it yet is only because it looks for such leases twice a second.
"""

from .client import LeaseLeft

LAST_SECOND_S = 1.0
STOOD_STILL_S = 0.5  # between two looks: what was seen before counts for nothing
SHORTEST_S = 2  # of one second, etcd would say none from the beginning on


class LastSecond:
    """The last second of a lease, from what etcd says of it again and again. Pure."""

    def __init__(self) -> None:
        """Know of no lease yet."""
        self._lease = 0
        self._since_s: float | None = None
        self._looked_s = 0.0

    def is_over(self, lease: int, left: LeaseLeft, now: float) -> bool:
        """Take in what etcd says now; say whether the lease has ended."""
        interrupted = lease != self._lease or now - self._looked_s > STOOD_STILL_S
        self._lease, self._looked_s = lease, now
        if left.left_s > 0 or left.granted_s < SHORTEST_S:
            self._since_s = None
        elif interrupted or self._since_s is None:
            self._since_s = now
        return self._since_s is not None and now - self._since_s >= LAST_SECOND_S

    def sooner(self, wait_s: float, now: float) -> float:
        """Return how long to wait until the next look: `wait_s`, or less where the lease may end before."""
        if self._since_s is None:
            return wait_s
        left_s = self._since_s + LAST_SECOND_S - now
        return min(wait_s, left_s) if left_s > 0 else wait_s
