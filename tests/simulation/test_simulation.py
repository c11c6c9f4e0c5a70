"""Whole jobs from seeds whose controllers die over every record, and seeds that replay."""

import pytest

from midstep.testing.invariants import Invariant, InvariantBroken
from midstep.testing.simulation.world import SimulatedWorld, simulate


@pytest.mark.parametrize("actions_done", [0, 1])
@pytest.mark.parametrize("seed", [3, 11, pytest.param(17, marks=pytest.mark.soak)])
def test_a_controller_that_dies_over_any_record_of_a_job_is_replaced(seed: int, actions_done: int) -> None:
    """With none of what follows from the record done, and with the first of it."""
    records = len(simulate(seed).controller.journal)
    terms = set()
    for number in range(2, records + 1):
        world = SimulatedWorld(seed)
        world.controller.crash_at = (number, actions_done)
        world.run()
        terms.add(world.controller.term)
    assert records > 30
    assert max(terms) > 1


def test_jobs_whose_nodes_are_in_racks_lose_nothing_when_copies_change_hands() -> None:
    """Ranks that move have another buddy in the next generation, in the middle of whatever fails there."""
    incidents = 0
    for seed in range(100, 160):
        world = SimulatedWorld(seed, racks=2)
        world.run()
        incidents += len(world.controller.machine.incidents)
    assert incidents > 50


def test_a_seed_replays_exactly() -> None:
    """So a failure can be looked at."""
    told = {simulate(11, whole_transcript=True).tell() for _ in range(2)}
    assert len(told) == 1


def test_a_broken_invariant_comes_with_its_seed_its_name_and_a_transcript() -> None:
    """Whoever reads the failure needs nothing else."""
    world = simulate(11)
    with pytest.raises(InvariantBroken) as failure:
        world.fail(Invariant.ALWAYS_ENDS, "made up")
    text = str(failure.value)
    assert text.startswith("always ends: made up\nseed 11: ")
    assert "ControllerStarted" in text
    assert text.endswith("seed 11: always ends: made up")
