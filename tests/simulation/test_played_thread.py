"""A played train thread is at one place at a time."""

import random
from itertools import count, islice

import pytest

from midstep.controller.recovery.state import Phase
from midstep.policies.schema import default_policy
from midstep.protocol.types import Activity
from midstep.testing.simulation import faults
from midstep.testing.simulation.setting import draw_setting
from midstep.testing.simulation.world import SimulatedWorld


@pytest.fixture
def lone_worlds(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedWorld]:
    """Worlds of one rank, whose collectives complete at once, with nothing planned against them."""
    monkeypatch.setattr(faults, "plan", lambda *args: None)
    settings = ((seed, draw_setting(random.Random(seed))) for seed in count())
    fitting = (
        seed
        for seed, setting in settings
        if setting.size == 1 and not setting.plain and setting.policy == default_policy() and setting.total_steps >= 10
    )
    return [SimulatedWorld(seed) for seed in islice(fitting, 10)]


def _play_until_training(world: SimulatedWorld) -> None:
    while world.machine.phase is not Phase.RUNNING or world.living()[0].activity is not Activity.COMPUTING:
        assert world.timeline.step()


def test_a_rank_whose_communicator_has_failed_leaves_its_step_and_does_not_compute_on_beside_that(
    lone_worlds: list[SimulatedWorld],
) -> None:
    """It is torn out at the collective that it comes to next, and waits there for orders."""
    for world in lone_worlds:
        _play_until_training(world)
        process = world.living()[0]
        assert process.group is not None
        process.lose_connection(process.group, "connection reset")
        committed = process.standing.count
        while world.machine.phase is not Phase.QUIESCING:
            left = process.activity is Activity.RECOVERING
            assert world.timeline.step()
            assert process.activity is Activity.RECOVERING or not left
        assert process.standing.count == committed
        world.run()
        assert world.machine.incidents
