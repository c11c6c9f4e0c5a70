"""A world that grows in place while other things go wrong: with seeds, the whole job, and all that must always hold."""

import random

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.incidents import Incident, Outcome
from midstep.testing.simulation import faults
from midstep.testing.simulation.world import SimulatedWorld

SEEDS = 24
ON_THE_WAY = (Phase.PAUSING, Phase.QUIESCING, Phase.REJOINING, Phase.RESUMING)


def to_and_fro(world: SimulatedWorld, chance: random.Random, _: Phase | None) -> None:
    """Nodes are lost, and others come, when the job is well."""
    for fault in (faults.kill_node, faults.add_node) * 3:
        world.injector.when_well(fault)


def with_other_faults(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have the usual faults happen, too, most of them while ranks are joining."""
    to_and_fro(world, chance, focus)
    faults.plan(world, chance, chance.choice(ON_THE_WAY))


def growths(world: SimulatedWorld) -> list[Incident]:
    """Return the incidents that are nothing but a growth in place."""
    alone = [each for each in world.machine.incidents if len(each.decisions) == 1]
    return [each for each in alone if "keep theirs" in each.decisions[0].reason]


def played(seed: int, plan: object) -> SimulatedWorld:
    """Play a job to its end."""
    world = SimulatedWorld(seed, plan=plan, grows=True)  # type: ignore[arg-type]
    world.run()
    return world


def test_no_process_of_a_world_ends_because_it_grows() -> None:
    """The ranks that trained keep their processes, no step is repeated, and new ones take part in the next."""
    seen = 0
    for seed in range(SEEDS):
        world = played(seed, to_and_fro)
        for each in growths(world):
            if each.outcome is not Outcome.RESUMED:
                continue
            seen += 1
            assert each.steps_lost == 0, world.tell()
            assert not set(each.pids_before) & set(each.replaced), world.tell()
            assert each.pids_before.items() <= each.pids_after.items(), world.tell()
    assert seen > SEEDS


@pytest.mark.parametrize("part", range(3))
def test_every_growth_ends_whatever_comes_between(part: int) -> None:
    """Ranks that trained and ranks that join die, hang and are cut off in every phase of it."""
    seeds = range(100 + part * SEEDS, 100 + (part + 1) * SEEDS)
    assert sum(len(growths(played(seed, with_other_faults))) for seed in seeds) > 0
