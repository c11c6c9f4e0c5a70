"""How long an attempt to link up may take."""

from midstep.policies.schema import CommunicatorPolicy
from midstep.processor.recovery_phases import LinkPatience


def test_each_attempt_may_take_longer_than_the_one_that_failed() -> None:
    """A slow network fails all attempts that are too short alike; a dead peer is found by the first one."""
    patience = LinkPatience()
    assert [patience.next_s(1.5) for _ in range(4)] == [1.5, 3.0, 6.0, 6.0]


def test_the_first_attempt_of_the_next_recovery_is_as_short_as_ever() -> None:
    """The world was connected in between."""
    patience = LinkPatience()
    patience.next_s(1.5)
    patience.linked_up()
    assert patience.next_s(1.5) == 1.5


def test_no_attempt_is_longer_than_a_rejoin_may_take() -> None:
    """The policy holds the deadline of a rejoin against the length of all attempts, each as long as the first."""
    patience, policy = LinkPatience(), CommunicatorPolicy()
    longest_s = max(patience.next_s(policy.link_up_s) for _ in range(policy.link_up_attempts))
    assert longest_s < policy.link_up_s * policy.link_up_attempts
