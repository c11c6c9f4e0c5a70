"""The leader tells its clock now and then, so that the next leader continues it, whatever its own wall clock says.

One that is an hour ahead would move the job's time by an hour, and with it the windows of budgets.
"""

import time

import msgspec

from ..clock import Clock, HeardClock
from .client import Condition, Etcd, put
from .place import EtcdPlace

TELL_S = 10.0  # between two times that the leader tells it
LOOK_S = 1.0  # between two looks of those that stand by

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(float).decode


class LeadersClock:
    """Hears the leader's clock while this controller stands by, and tells its own one when it leads.

    `look_after` is for one thread.
    """

    def __init__(self, place: EtcdPlace) -> None:
        self._key = place.clock
        self._own: tuple[Clock, Condition] | None = None
        self._next_s = 0.0
        self._looked_s: float | None = None
        self._revision = 0
        self.heard: HeardClock | None = None

    def lead(self, clock: Clock, holds: Condition) -> None:
        """Tell this clock from now on, for as long as the term `holds`."""
        self._own = clock, holds
        self._next_s = 0.0

    def look_after(self, etcd: Etcd, lease: int, ttl_s: float) -> None:
        """Tell or hear it, when it is time to. `lease`, `ttl_s`: of this controller, and of all.

        Raises StoreUnreachable, and once DecodeError for a value that no controller has written.
        """
        now = time.monotonic()
        if now < self._next_s:
            return
        if self._own is not None:
            clock, holds = self._own
            etcd.change([holds], [put(self._key, _encode(clock.now()), lease)])
            self._next_s = now + TELL_S
            return
        known = etcd.get(self._key)
        if known is not None and known.revision != self._revision:
            # It was told after the last look; before the first one, while its leader's lease was kept.
            slack_s = TELL_S + ttl_s if self._looked_s is None else time.monotonic() - self._looked_s
            self._revision = known.revision
            self.heard = HeardClock(_decode(known.value), time.monotonic(), slack_s)
        self._looked_s = now
        self._next_s = now + LOOK_S
