"""The lease of a leader that shows no sign of life is ended by those that stand by, not only by etcd."""

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from midstep.controller.election import etcd_election
from midstep.controller.election.etcd_election import EtcdElection, LeaderEntry
from midstep.controller.election.presence import EtcdPresence
from midstep.controller.etcd.client import Etcd, LeaseLeft, put
from midstep.controller.etcd.place import EtcdPlace
from midstep.protocol.errors import JournalError

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(60)]

LONG_S = 600  # longer than the test
SHORT_WAIT_S, LEASE_S = 2.5, 2.0


class LastSecondEtcd(Etcd):
    """Says of every lease that it is in its last second, as etcd does before it looks for leases that have ended."""

    def look_at_lease(self, lease: int) -> LeaseLeft:
        left = super().look_at_lease(lease)
        assert LONG_S - 60 < left.left_s <= LONG_S, "etcd says how long a lease lasts"
        return LeaseLeft(0, left.granted_s)


@pytest.fixture
def silent_leader(place: EtcdPlace) -> Iterator[int]:
    """The lease of a leader of which nothing is heard any more."""
    with closing(Etcd(place)) as etcd:
        lease = etcd.grant(LONG_S)
        etcd.change([], [put(place.leader, msgspec.json.encode(LeaderEntry("gone", "m0", 1, 1, 1)), lease)])
        yield lease
        etcd.revoke(lease)


def stand(place: EtcdPlace, wait_s: float | None, *, admitted: bool = True) -> None:
    """Stand for the lead, which is not taken before a term begins."""
    presence = cast(EtcdPresence, SimpleNamespace(lease=0))
    EtcdElection(place, presence, lease_s=LEASE_S, admitted=lambda: admitted).stand(wait_s, lambda: None).close()


@pytest.fixture
def last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have those that stand by hear that the lease is in its last second."""
    monkeypatch.setattr(etcd_election, "Etcd", LastSecondEtcd)


@pytest.mark.usefixtures("last_second")
def test_a_lease_that_is_over_is_ended_and_all_that_is_kept_under_it(place: EtcdPlace, silent_leader: int) -> None:
    with closing(LastSecondEtcd(place)) as etcd:
        stand(place, None)
        assert etcd.get(place.leader) is None
        assert not etcd.keep_alive(silent_leader)
        etcd.revoke(silent_leader)  # as another one does that stands by: it was ended already, and that is no failure


@pytest.mark.usefixtures("last_second")
def test_whoever_may_not_lead_ends_no_lease(place: EtcdPlace, silent_leader: int) -> None:
    """While the failover is paused, and where another controller was promoted."""
    with closing(LastSecondEtcd(place)) as etcd:
        with pytest.raises(JournalError, match="another controller is active"):
            stand(place, SHORT_WAIT_S, admitted=False)
        assert etcd.keep_alive(silent_leader)


def test_a_lease_that_lasts_is_left_alone(place: EtcdPlace, silent_leader: int) -> None:
    with closing(Etcd(place)) as etcd:
        with pytest.raises(JournalError, match="another controller is active"):
            stand(place, SHORT_WAIT_S)
        assert etcd.keep_alive(silent_leader)
