"""One campaign of jobs from seeds: whatever fails, in whatever order, the invariants hold after every event.

`MIDSTEP_SIM_SEEDS=7:8` runs one seed, `MIDSTEP_SIM_INCIDENTS=100000` many more.
"""

import os

import pytest

from midstep.testing.simulation.campaign import Tally, run_campaign
from midstep.testing.simulation.world import simulate

INCIDENTS = int(os.environ.get("MIDSTEP_SIM_INCIDENTS", "500"))
LIMIT_S = 60 + INCIDENTS // 5  # for machines that do other things besides


@pytest.fixture(scope="module")
def campaign() -> Tally:
    """What the seeds came to."""
    first, _, last = os.environ.get("MIDSTEP_SIM_SEEDS", "0:1000000").partition(":")
    return run_campaign(range(int(first), int(last)), incidents=INCIDENTS)


@pytest.mark.timeout(LIMIT_S)
def test_the_invariants_hold_whatever_fails(campaign: Tally) -> None:
    """Every incident ends, nothing committed is lost, nobody healthy is replaced. A seed that fails tells all."""
    print(f"{campaign.incidents} incidents, {campaign.dismissed} dismissed suspicions in {campaign.seeds} seeds")
    for seed, _, _ in campaign.broken:
        simulate(seed)
    assert campaign.broken == []


def test_worlds_of_the_campaign_get_smaller_and_larger_again(campaign: Tally) -> None:
    """With all invariants checked, those about the size among them."""
    print(f"{campaign.shrunk} worlds of {campaign.seeds} got smaller, {campaign.grown} larger again")
    assert campaign.shrunk > 0
    assert campaign.grown > 0
