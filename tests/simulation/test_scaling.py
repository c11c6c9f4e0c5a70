"""Worlds that get another size, in the simulation."""

from midstep.simulation.campaign import Tally


def test_worlds_of_the_campaign_get_smaller_and_larger_again(campaign: Tally) -> None:
    """With all invariants checked, those about the size among them."""
    print(f"{campaign.shrunk} worlds of {campaign.seeds} got smaller, {campaign.grown} larger again")
    assert campaign.shrunk > 0
    assert campaign.grown > 0
