"""Slow ranks through whole jobs: named within some steps, and drained with no step repeated; nobody else ever is."""

import random
from typing import Any

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.incidents import Incident, Outcome
from midstep.protocol.types import FaultKind
from midstep.testing.simulation.process import Process
from midstep.testing.simulation.world import SimulatedWorld

SEEDS = 40
IN_EACH_RUN = 4  # of these; the others are long tests
CABLE_S = 0.1  # at each of the two ends of a link; all else of a step takes as long
SLOW_AT, WITHIN = 60, 24  # 20 steps, or one round more: they differ as much as from one to five


def seeds(first: int) -> list[Any]:
    """Return seeds, most of them for the long tests."""
    numbers = range(first, first + SEEDS)
    return [*numbers[:IN_EACH_RUN], *(pytest.param(each, marks=pytest.mark.soak) for each in numbers[IN_EACH_RUN:])]


class Slowing:
    """Makes one rank slow once it has done some steps, and remembers when, and of which node."""

    def __init__(self, times: float) -> None:
        self.times, self.node, self.began, self.named = times, "", 0, 0

    def __call__(self, world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
        """Look now and then whether it is time."""
        world.timeline.after(1.0, lambda: self._look(world, chance))

    def _look(self, world: SimulatedWorld, chance: random.Random) -> None:
        ready = [each for each in world.living() if each.standing.count >= SLOW_AT]
        if not ready or not self.times:
            world.timeline.after(0.2, lambda: self._look(world, chance))
            return
        victim: Process = chance.choice(sorted(ready, key=lambda each: each.rank))
        self._slow_down(victim)
        self.node, self.began = victim.agent.name, victim.standing.count
        self._watch(world, victim)

    def _slow_down(self, victim: Process) -> None:
        victim.slowness = self.times

    def _watch(self, world: SimulatedWorld, victim: Process) -> None:
        """Note how far the rank is when it is named."""
        if world.machine.state.book.standing():
            self.named = victim.standing.count
        else:
            world.timeline.after(0.05, lambda: self._watch(world, victim))


class SlowCable(Slowing):
    """Makes the cable of one machine slow, once its ranks have done some steps."""

    def _slow_down(self, victim: Process) -> None:
        victim.agent.cable_s = CABLE_S


def drains(world: SimulatedWorld, kind: FaultKind = FaultKind.SLOW) -> list[Incident]:
    """Return the incidents in which ranks were moved for being slow."""
    found = [each for each in world.machine.incidents if each.reports[0].kind is kind]
    return [each for each in found if each.outcome is not Outcome.DISMISSED]


@pytest.mark.parametrize("seed", seeds(0))
def test_a_slow_rank_is_named_soon_and_drained_with_no_step_repeated(seed: int) -> None:
    """With a network that loses messages, and steps that differ as much as from one to five."""
    slowing = Slowing(5.0)
    world = SimulatedWorld(seed, plan=slowing, slow_ranks=True)
    world.run()
    (drain,) = drains(world)
    assert len(world.machine.incidents) == 1
    assert drain.reports[0].node == slowing.node
    assert slowing.began < slowing.named <= slowing.began + WITHIN
    assert drain.steps_lost == 0
    ranks = world.setting.ranks_per_node
    assert len(drain.replaced) == ranks
    (fault,) = [
        each.report for each in world.machine.status(world.timeline.now).faults if each.report.kind is FaultKind.SLOW
    ]
    assert fault.node == slowing.node


@pytest.mark.parametrize("seed", seeds(3 * SEEDS))
def test_a_machine_with_a_slow_cable_is_drained_with_no_step_repeated(seed: int) -> None:
    """All ranks wait for its links, and none computes more slowly; no other machine is named."""
    slowing = SlowCable(1.0)
    world = SimulatedWorld(seed, plan=slowing, slow_ranks=True, least_nodes=3)
    world.run()
    (drain,) = drains(world, FaultKind.SLOW_LINK)
    assert len(world.machine.incidents) == 1
    assert drain.reports[0].node == slowing.node
    assert slowing.began < slowing.named <= slowing.began + WITHIN
    assert drain.steps_lost == 0


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_where_no_rank_is_slow_none_is_named(seed: int) -> None:
    world = SimulatedWorld(seed, plan=Slowing(0.0), slow_ranks=True)
    world.run()
    assert not world.machine.incidents
    assert world.machine.status(world.timeline.now).faults == ()


@pytest.mark.parametrize("seed", seeds(2 * SEEDS))
def test_other_faults_are_recovered_from_as_without_it(seed: int) -> None:
    """Ranks die, hang and are slowed down meanwhile; the invariants hold after each event."""
    SimulatedWorld(seed, slow_ranks=True).run()
