"""The table of rank states says what happens, and nothing else."""

import gc
from itertools import product

import pytest

from midstep.controller import world
from midstep.controller.rank_states import NEXT, RankEvent, RankState, after
from midstep.controller.recovery.state import Phase
from midstep.simulation.campaign import run_seeds

MOST_SEEDS = 200  # for each phase that the faults wait for
CHUNK = 2


@pytest.mark.timeout(600)
def test_what_the_table_claims_is_reached_and_what_is_reached_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """In jobs whose faults wait for each phase in turn."""
    reached = set()

    def spy(state: RankState, event: RankEvent) -> RankState:
        reached.add((state, event))
        return after(state, event)

    monkeypatch.setattr(world, "after", spy)
    gc.freeze()  # each chunk collects, and what other tests of this process have imported is large
    try:
        for first, focus in product(range(0, MOST_SEEDS, CHUNK), (None, *Phase)):
            if first and reached >= NEXT.keys():
                break
            assert run_seeds(range(first, first + CHUNK), focus=focus).broken == []
    finally:
        gc.unfreeze()
    assert reached == NEXT.keys()
