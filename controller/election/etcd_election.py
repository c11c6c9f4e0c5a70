"""The election by etcd: the leader has a key under its lease, and the next one leads when there is no such key.

etcd alone measures how long a lease lasts; those that stand by end one that is over, since etcd notices it up to half a
second late (`LastSecond`). Nothing rests on that: what is written is compared with the term that holds, so a leader
that was taken for dead can write nothing once another term has begun, whatever it believes.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from ...protocol.errors import JournalSuperseded, StoreUnreachable
from ..etcd.client import Condition, Etcd, Kept, LeaseLeft, Operation, absent, holds, put
from ..etcd.place import EtcdPlace
from ..journal.records import TermRecord
from .election import WatchedElection
from .presence import EtcdPresence

POLL_S = 0.1
AGAIN_S = 1.0  # between two tries to keep the lead after the lease has ended
LAST_SECOND_S = 1.0
STOOD_STILL_S = 0.5  # between two looks: what was seen before counts for nothing
SHORTEST_S = 2  # of one second, etcd would say none from the beginning on

_log = logging.getLogger(__name__)


class LeaderEntry(msgspec.Struct, frozen=True):
    """The leader, as it describes itself. `session` tells it from all others."""

    name: str
    host: str
    pid: int
    term: int
    session: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LeaderEntry).decode


class LastSecond:
    """The last second of a lease, from what etcd says of it again and again. Pure.

    etcd says how long a lease lasts in whole seconds, rounded down. From the first time on that it says none, the lease
    has less than a second; when a second has passed by the own clock, and it still says none, the lease is over. That
    etcd has not ended it yet is only because it looks for such leases twice a second.
    """

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


class EtcdElection(WatchedElection):
    """Stands for the lead in an etcd, under the lease of this controller's presence."""

    def __init__(
        self,
        place: EtcdPlace,
        presence: EtcdPresence,
        *,
        lease_s: float,
        admitted: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(lambda: _LeaderKey(Etcd(place), place, presence, lease_s), admitted)


class _LeaderKey:
    """The leader's key, as one controller that stands for the lead sees it."""

    def __init__(self, etcd: Etcd, place: EtcdPlace, presence: EtcdPresence, lease_s: float) -> None:
        self._etcd: Etcd | None = etcd
        self._place = place
        self._presence = presence
        self._lease_s = lease_s
        self._leader: Kept | None = None
        self._not_before_s = 0.0
        self._last_second = LastSecond()

    def take(self, admitted: Callable[[], bool]) -> "EtcdLeadership | None":
        """Take the lead when the term begins; see `LeadStore`."""
        assert self._etcd is not None
        leader = self._leader = self._etcd.get(self._place.leader)
        if leader is not None and self._is_overdue(self._etcd, leader) and admitted():
            self._etcd.revoke(leader.lease)
            _log.warning("%s: the lease of %s is over", self._place, _named(leader.value))
            leader = self._leader = self._etcd.get(self._place.leader)
        if leader is not None or time.monotonic() < self._not_before_s or not admitted():
            return None
        etcd, self._etcd = self._etcd, None
        return EtcdLeadership(etcd, self._place, self._presence)

    def _is_overdue(self, etcd: Etcd, leader: Kept) -> bool:
        """Say whether the leader's lease has ended. Where etcd does not tell, it ends it some time by itself."""
        try:
            left = etcd.look_at_lease(leader.lease)
        except StoreUnreachable as error:
            _log.debug("the end of the leader's lease is left to etcd: %s", error)
            return False
        return self._last_second.is_over(leader.lease, left, time.monotonic())

    def forget(self) -> None:
        """Leave a lease's time to the one that led; see `LeadStore`."""
        self._not_before_s = time.monotonic() + self._lease_s

    def rival(self) -> str:
        """Say who leads; see `LeadStore`."""
        return (
            f"{self._place}: another controller is active "
            f"({_named(self._leader.value) if self._leader else 'until just now'}). "
            "One job has one active controller: end that one, or start this one with --standby."
        )

    def look_s(self) -> float:
        """Return how long to wait until the next look."""
        return self._last_second.sooner(POLL_S, time.monotonic())

    def close(self) -> None:
        """Close the connections, unless the leadership has them. Idempotent."""
        if self._etcd is not None:
            self._etcd.close()


class EtcdLeadership:
    """The lead of one term, kept under the lease of this controller."""

    def __init__(self, etcd: Etcd, place: EtcdPlace, presence: EtcdPresence) -> None:
        """Not for callers: `EtcdElection.stand`. It closes `etcd`."""
        self.etcd = etcd
        self._place = place
        self._presence = presence
        self._entry = self._term = b""
        self._number = 0
        self._lease = presence.lease
        self._again_s = 0.0

    def claim(self, record: TermRecord, encoded: bytes) -> tuple[list[Condition], list[Operation]]:
        """Return what has to hold to take the lead, and what takes it, for the transaction that begins the term.

        The record, as it is `encoded`, holds while this one leads.
        """
        presence = self._presence
        entry = LeaderEntry(presence.name, presence.host, presence.pid, record.term, record.session)
        self._entry, self._term, self._number = _encode(entry), encoded, record.term
        return [absent(self._place.leader)], [put(self._place.leader, self._entry, self._lease)]

    def begin(self, term: int) -> None:
        """The transaction that begins the term takes the lead."""

    def overthrow(self) -> bool:
        """The journal needs no end of the last leader."""
        return False

    def close(self) -> None:
        """Close the connections. The lead ends with the controller's lease (`EtcdPresence.close`)."""
        self.etcd.close()

    def holds(self) -> Condition:
        """Hold while no later term has begun."""
        return holds(self._place.term, self._term)

    def beat(self) -> None:
        """Show that the loop runs."""
        self._presence.beat()

    def require(self) -> None:
        """Raise JournalSuperseded when another controller leads by now. Asks etcd only after the lease has ended."""
        now = time.monotonic()
        if self._presence.lease == self._lease or now < self._again_s:
            return
        self._again_s = now + AGAIN_S
        lease = self._presence.lease
        try:
            known = self.etcd.get(self._place.leader)
            condition = absent(self._place.leader) if known is None else holds(self._place.leader, self._entry)
            kept = self.etcd.change([condition, self.holds()], [put(self._place.leader, self._entry, lease)])
            if kept is None:
                self.require_term()
                return
        except StoreUnreachable as error:
            _log.warning("whether this controller still leads is not known: %s", error)
            return
        self._lease = lease
        _log.warning("this controller leads under another lease; no other one had taken the lead")

    def require_term(self) -> None:
        """Raise JournalSuperseded when a later term has begun, StoreUnreachable when etcd cannot say so."""
        known = self.etcd.get(self._place.term)
        if known is None or known.value != self._term:
            raise JournalSuperseded(
                f"{self._place}: term {self._number} is over, another controller leads the job by now. This one is not "
                "in service any more, and must leave."
            )


def _named(value: bytes) -> str:
    try:
        leader = _decode(value)
    except msgspec.MsgspecError:
        return "it cannot be read which"
    return f"{leader.name}, pid {leader.pid} on {leader.host}"
