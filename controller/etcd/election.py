"""The election by etcd: the leader has a key under its lease, and the next one leads when there is no such key.

etcd alone measures how long a lease lasts; those that stand by end one that is over, since etcd takes its time with it.
Nothing rests on that: what is written is compared with the term that holds, so a leader that was taken for dead can
write nothing once another term has begun, whatever it believes.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from ...protocol.errors import JournalError, JournalSuperseded, StoreUnreachable
from .client import Condition, Etcd, Kept, Operation, absent, holds, put
from .overdue import LastSecond
from .place import EtcdPlace
from .presence import Presence

POLL_S = 0.1
AGAIN_S = 1.0  # between two tries to keep the lead after the lease has ended

_log = logging.getLogger(__name__)


class LeaderEntry(msgspec.Struct, frozen=True):
    """Who leads, as it says itself. `session` tells it from all others."""

    name: str
    host: str
    pid: int
    term: int
    session: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LeaderEntry).decode


def wait_to_lead(
    etcd: Etcd,
    place: EtcdPlace,
    wait_s: float | None,
    *,
    lease_s: float,
    beat: Callable[[], None],
    admitted: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until no controller leads, and this one may: at most `wait_s`; None: for as long as it takes.

    After a time in which etcd could not be reached, the one that led gets a lease's time to show that it still lives.
    Raises JournalError: another one leads after `wait_s`, or etcd cannot be reached.
    """
    give_up_s = None if wait_s is None else time.monotonic() + wait_s
    not_before_s, told, last_second = 0.0, False, LastSecond()
    while True:
        now = time.monotonic()
        try:
            leader = etcd.get(place.leader)
            if leader is not None and _is_overdue(etcd, leader, last_second) and admitted():
                etcd.revoke(leader.lease)
                _log.warning("%s: the lease of %s is over", place, _named(leader.value))
                continue
            if leader is None and now >= not_before_s and admitted():
                return
            failure = JournalError(
                f"{place}: another controller is active ({_named(leader.value) if leader else 'until just now'}). "
                "One job has one active controller: end that one, or start this one with --standby."
            )
        except StoreUnreachable as error:
            not_before_s, failure = time.monotonic() + lease_s, error
            if not told:
                told = True
                _log.warning("%s", error)
        if give_up_s is not None and now >= give_up_s:
            raise failure
        beat()
        # etcd's gateway has no wait for a change with a deadline.
        time.sleep(last_second.sooner(POLL_S, time.monotonic()))


def _is_overdue(etcd: Etcd, leader: Kept, last_second: LastSecond) -> bool:
    """Say whether the leader's lease has ended. Where etcd does not tell, it ends it some time by itself."""
    try:
        left = etcd.look_at_lease(leader.lease)
    except StoreUnreachable as error:
        _log.debug("the end of the leader's lease is left to etcd: %s", error)
        return False
    return last_second.is_over(leader.lease, left, time.monotonic())


class EtcdLeadership:
    """The lead of one term, kept under the lease of this controller."""

    def __init__(self, etcd: Etcd, place: EtcdPlace, presence: Presence, entry: LeaderEntry, term: bytes) -> None:
        """Not for callers: `EtcdJournal.open`. `term`: the record of the term, which holds while this one leads."""
        self._etcd = etcd
        self._place = place
        self._presence = presence
        self._entry = _encode(entry)
        self._number = entry.term
        self._term = term
        self._lease = presence.lease
        self._again_s = 0.0

    def claim(self) -> tuple[list[Condition], list[Operation]]:
        """Return what has to hold to take the lead, and what takes it, for the transaction that begins the term."""
        return [absent(self._place.leader)], [put(self._place.leader, self._entry, self._lease)]

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
            known = self._etcd.get(self._place.leader)
            condition = absent(self._place.leader) if known is None else holds(self._place.leader, self._entry)
            kept = self._etcd.change([condition, self.holds()], [put(self._place.leader, self._entry, lease)])
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
        known = self._etcd.get(self._place.term)
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
