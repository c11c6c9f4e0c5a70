"""One campaign of jobs from seeds: whatever fails, in whatever order, the invariants hold after every event.

`MIDSTEP_SIM_SEEDS=7:8` runs one seed, `MIDSTEP_SIM_INCIDENTS=100000` many more.
"""

import os

import pytest

from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.table import TABLE
from midstep.simulation.campaign import Tally, run_campaign, run_seeds
from midstep.simulation.world import simulate

INCIDENTS = int(os.environ.get("MIDSTEP_SIM_INCIDENTS", "10000"))
LIMIT_S = 60 + INCIDENTS // 5  # for machines that do other things besides
MOST_SEEDS = 400  # for one phase


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


@pytest.mark.timeout(600)
def test_every_row_of_the_table_happens_in_each_of_its_phases(campaign: Tally) -> None:
    """What the campaign has not reached is looked for in jobs whose faults wait for that phase."""
    rows = {(phase, event.__name__) for phase, event in TABLE}
    reached = {(phase, event) for phase, event, _ in campaign.reached}
    for phase in Phase:
        for first in range(0, MOST_SEEDS, 20):
            if all(pair in reached for pair in rows if pair[0] is phase):
                break
            tally = run_seeds(range(first, first + 20), focus=phase)
            assert tally.broken == []
            reached |= {(phase, event) for phase, event, _ in tally.reached}
    assert sorted(rows - reached) == []


def test_worlds_of_the_campaign_get_smaller_and_larger_again(campaign: Tally) -> None:
    """With all invariants checked, those about the size among them."""
    print(f"{campaign.shrunk} worlds of {campaign.seeds} got smaller, {campaign.grown} larger again")
    assert campaign.shrunk > 0
    assert campaign.grown > 0
