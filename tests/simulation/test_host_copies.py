"""Copies in host memory through whole jobs: from the first common one on there is always one, and it is found."""

import random

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.types import RepairPart, RestoreSource
from midstep.testing.invariants import InvariantBroken
from midstep.testing.simulation import faults
from midstep.testing.simulation.host_copies import PlayedCopies
from midstep.testing.simulation.network import Thread
from midstep.testing.simulation.world import SimulatedWorld

from ..mutants.mutant import Mutant, applied

SEEDS = 120
CADENCE, REPAIR = "midstep.processor.copy_cadence", "midstep.controller.recovery.repair"
BUDDIES = "midstep.controller.recovery.buddies"
NEWEST = "return max((step for step in steps if most"


def with_damage(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have the usual faults happen, and a copy damaged now and then."""
    faults.plan(world, chance, focus)

    def damage() -> None:
        places = [place for agent in world.agents.values() for place in agent.places.values()]
        place = chance.choice(places) if places else None
        if place is not None:
            place.damaged |= {max(step for step, _ in place.host_copies)} - {0}

    for _ in range(3):
        world.timeline.after(chance.uniform(0.0, 20.0), damage)


def played(seeds: range) -> list[SimulatedWorld]:
    """Return jobs with copies, played to the end."""
    worlds = [SimulatedWorld(seed, host_copies=True, plan=with_damage if seed % 2 else None) for seed in seeds]
    for world in worlds:
        world.run()
    return worlds


def test_all_go_back_to_the_newest_common_copy_and_no_further() -> None:
    """Processes and nodes are lost, also in the middle of a copy and of a recovery, and some copies are damaged."""
    sources = [incident.restore for world in played(range(SEEDS)) for incident in world.machine.incidents]
    assert sources.count(RestoreSource.HOST_COPY) > SEEDS // 10


def test_a_lost_node_costs_no_more_than_a_process_where_each_copy_is_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """If both holders of a copy are lost the checkpoint is read, or the job begins again or stops; never a mixture."""
    brought, bring = list[int](), PlayedCopies.bring

    def watched(self: PlayedCopies, part: RepairPart) -> Thread[None]:
        brought.extend(move.destination for move in part.copy_transfers if move.source == self.rank)
        return bring(self, part)

    monkeypatch.setattr(PlayedCopies, "bring", watched)
    worlds = played(range(SEEDS, 3 * SEEDS))
    assert len(brought) > SEEDS // 10
    twice = [world for world in worlds if world.policy.host_copy.copies > 1]
    sources = {incident.restore for world in twice for incident in world.machine.incidents}
    assert sources >= {RestoreSource.HOST_COPY, RestoreSource.CHECKPOINT}


@pytest.mark.parametrize(
    "broken",
    [
        Mutant(
            "before the last one is whole", CADENCE, "return self._whole and self.due(step)", "return self.due(step)"
        ),
        Mutant("over the newest", CADENCE, "return min((index", "return max((index"),
        Mutant("the common one is not kept", REPAIR, '"host_copy": host_copy', '"host_copy": 0'),
        Mutant("those on other nodes are forgotten", BUDDIES, "found.get(kept.rank, set()).add", "set().add"),
        Mutant("the oldest is taken", BUDDIES, NEWEST, NEWEST.replace("max", "min")),
    ],
    ids=lambda broken: broken.name,
)
def test_a_break_of_the_rules_is_seen(broken: Mutant) -> None:
    """Each would leave no step of which all ranks have a copy, or pass one over."""
    with applied(broken), pytest.raises(InvariantBroken, match="nothing lost"):
        played(range(SEEDS))
