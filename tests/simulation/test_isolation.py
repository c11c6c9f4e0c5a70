"""A controller that is cut off from its nodes for a while takes none of them for lost: no process is replaced."""

import random

import pytest

from midstep.controller.recovery.state import Phase
from midstep.testing.invariants import InvariantBroken
from midstep.testing.simulation.faults import isolate_controller
from midstep.testing.simulation.world import SimulatedWorld

from ..mutants.mutant import Mutant, applied

SEEDS = 150


def isolated_jobs() -> list[SimulatedWorld]:
    """Return jobs to which nothing else happens, played to the end; a plain script may end badly by itself."""

    def plan(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
        world.injector.when_well(isolate_controller)
        world.injector.when_well(isolate_controller)

    worlds = [SimulatedWorld(seed, plan=plan) for seed in range(SEEDS)]
    jobs = [world for world in worlds if not world.setting.plain]
    for world in jobs:
        world.run()
    return jobs


def test_no_healthy_rank_is_replaced_by_an_isolated_controller() -> None:
    jobs = isolated_jobs()
    states = [world.machine.state for world in jobs]
    assert {incident.replaced for world in jobs for incident in world.machine.incidents} <= {()}
    assert sum(len(state.history.holds) for state in states) > SEEDS / 2
    assert not any(hold.lost for state in states for hold in state.history.holds)


def test_a_controller_that_holds_nothing_is_caught() -> None:
    """Otherwise the test above would show nothing."""
    module = "midstep.controller.liveness"
    mutant = Mutant("", module, "if silent and self._deaf_since_s is not None", "if silent and False")
    with applied(mutant), pytest.raises(InvariantBroken):
        isolated_jobs()
