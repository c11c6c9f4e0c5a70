"""When the lease of a leader in etcd is over, from answers that are rounded down to whole seconds."""

from midstep.controller.election.etcd_election import LAST_SECOND_S, STOOD_STILL_S, LastSecond
from midstep.controller.etcd.client import LeaseLeft

LEASE = 7
LOOK_S = 0.1
NEARLY_S = 0.01


def look(last: LastSecond, left_s: int, *, begin: float, seconds: float, lease: int = LEASE) -> bool:
    """Look again and again for some time; say whether the lease was over at any of the looks."""
    looks = round(seconds / LOOK_S)
    return any(last.is_over(lease, LeaseLeft(left_s, 2), begin + number * LOOK_S) for number in range(looks))


def test_a_lease_that_is_kept_alive_is_not_over() -> None:
    assert not look(LastSecond(), 1, begin=0.0, seconds=60.0)


def test_a_lease_is_over_when_it_has_had_less_than_a_second_for_a_second() -> None:
    last = LastSecond()
    assert not look(last, 0, begin=5.0, seconds=LAST_SECOND_S)
    assert last.is_over(LEASE, LeaseLeft(0, 2), 5.0 + LAST_SECOND_S)


def test_a_lease_that_is_kept_alive_late_is_not_over_and_gets_a_new_last_second() -> None:
    last = LastSecond()
    assert not look(last, 0, begin=0.0, seconds=0.9)
    assert not look(last, 1, begin=0.9, seconds=0.5)
    assert not look(last, 0, begin=1.4, seconds=LAST_SECOND_S - NEARLY_S)


def test_a_look_after_a_time_without_one_knows_nothing_of_what_was_before() -> None:
    last = LastSecond()
    assert not look(last, 0, begin=0.0, seconds=0.5)
    assert not last.is_over(LEASE, LeaseLeft(0, 2), 0.5 + 2 * STOOD_STILL_S)


def test_the_lease_of_the_next_leader_is_another_one() -> None:
    last = LastSecond()
    assert not look(last, 0, begin=0.0, seconds=0.9)
    assert not look(last, 0, begin=0.9, seconds=0.9, lease=LEASE + 1)


def test_nothing_is_concluded_about_a_lease_that_never_has_a_whole_second() -> None:
    last = LastSecond()
    assert not any(last.is_over(LEASE, LeaseLeft(0, 1), number * LOOK_S) for number in range(100))


def test_the_next_look_is_when_the_lease_may_end() -> None:
    last = LastSecond()
    assert last.sooner(LOOK_S, 0.0) == LOOK_S
    last.is_over(LEASE, LeaseLeft(0, 2), 0.0)
    assert last.sooner(LOOK_S, 0.5) == LOOK_S
    assert last.sooner(LOOK_S, LAST_SECOND_S - NEARLY_S) <= 2 * NEARLY_S
    assert last.sooner(LOOK_S, LAST_SECOND_S + NEARLY_S) == LOOK_S
