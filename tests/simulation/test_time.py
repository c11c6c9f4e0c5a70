"""Where the time of simulated jobs went, held against their incidents. That it adds up is asked after every event."""

from midstep.protocol.incidents import Outcome
from midstep.protocol.time_spent import RECOVERY, TimeCategory
from midstep.testing.simulation.world import SimulatedWorld

SEEDS = range(90)
ROUNDED_S = 1e-6
# Beside the parts of a recovery, what an incident can be spent on.
_OF_INCIDENTS = (*RECOVERY, TimeCategory.WAITING, TimeCategory.CHECKPOINT, TimeCategory.PLANNED, TimeCategory.UNGUARDED)


def test_time_adds_up_and_incidents_are_told_as_their_records_tell_them() -> None:
    """Of a job with one controller, whose incidents all ended in training, within a hundredth of its time."""
    told = 0
    for seed in SEEDS:
        world = SimulatedWorld(seed)
        world.run()
        spent = world.controller.times.until(world.timeline.now)
        assert spent is not None
        assert abs(sum(spent.seconds.values()) - spent.wall_s) <= 0.01 * spent.wall_s
        incidents = world.machine.incidents
        if world.controller.term > 1 or any(each.outcome is not Outcome.RESUMED for each in incidents):
            continue
        recorded_s = sum(each.recovery_s or 0.0 for each in incidents)
        before_s = incidents[0].began_s - spent.began_s if incidents else spent.wall_s
        counted_s = sum(spent.seconds.get(each, 0.0) for each in _OF_INCIDENTS)
        outside_s = min(before_s, spent.seconds.get(TimeCategory.WAITING, 0.0))
        outside_s += spent.seconds.get(TimeCategory.CHECKPOINT, 0.0)  # before a stop that somebody asked for
        assert recorded_s - 0.01 * spent.wall_s - ROUNDED_S <= counted_s, (seed, spent, incidents)
        assert counted_s - outside_s <= recorded_s + 0.01 * spent.wall_s + ROUNDED_S, (seed, spent, incidents)
        told += len(incidents)
    assert told > 10
