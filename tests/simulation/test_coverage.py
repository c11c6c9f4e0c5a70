"""The transition table is lived: every row, in every phase that it names, happens to simulated jobs."""

import pytest

from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.table import TABLE
from midstep.simulation.campaign import Tally, run_seeds

MOST_SEEDS = 400  # for one phase

# What is taken in a phase and cannot be played yet: (phase, name of the event). To be emptied, with a new kind of fault
# in midstep/simulation for each.
NOT_YET_PLAYED: frozenset[tuple[Phase, str]] = frozenset()


@pytest.mark.timeout(600)
def test_every_row_of_the_table_happens_in_each_of_its_phases(campaign: Tally) -> None:
    """What the campaign has not reached is looked for in jobs whose faults wait for that phase."""
    rows = {(phase, event.__name__) for phase, event in TABLE} - NOT_YET_PLAYED
    reached = {(phase, event) for phase, event, _ in campaign.reached}
    for phase in Phase:
        for first in range(0, MOST_SEEDS, 20):
            if all(pair in reached for pair in rows if pair[0] is phase):
                break
            tally = run_seeds(range(first, first + 20), focus=phase)
            assert tally.broken == []
            reached |= {(phase, event) for phase, event, _ in tally.reached}
    assert sorted(rows - reached) == []
