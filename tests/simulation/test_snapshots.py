"""A controller that begins with a snapshot decides what one decides that has replayed every event."""

import random
from typing import Any

import pytest

from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.controller.routes import Routes
from midstep.testing.simulation.world import SimulatedWorld

SEEDS = range(2)  # for each phase that the faults wait for
FOUNDED = ("job", "ladder")


class Controlled(Learned):
    """A controller of a world's job, at its founding or at a snapshot."""

    def __init__(self, world: SimulatedWorld, snapshot: bytes | None = None) -> None:
        self.real = RecoveryMachine(world.policy, world.job, can_create_nodes=world.setting.can_create_nodes)
        super().__init__(self.real, Routes(), Liveness(world.policy.heartbeat))
        if snapshot is not None:
            self.restore(snapshot)

    def everything(self) -> Any:
        """All that it knows."""
        learned = (self.finish, self.stop_requested, self.at_s, self.liveness.learned())
        return content((self.real.state, self.routes, learned))


def content(value: Any) -> Any:
    """What a value is made of: private fields, the order of dictionaries; not what the job was founded with."""
    if isinstance(value, dict):
        return [(content(key), content(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [content(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(content, value))
    fields = getattr(value, "__dict__", None) or {
        name: getattr(value, name) for name in getattr(value, "__struct_fields__", ())
    }
    if not fields or type(value).__module__ == "enum":
        return value
    return type(value).__name__, [(name, content(each)) for name, each in fields.items() if name not in FOUNDED]


def played(seed: int, focus: Phase | None) -> SimulatedWorld:
    world = SimulatedWorld(seed, focus=focus)
    world.run()
    return world


@pytest.mark.timeout(600)
@pytest.mark.parametrize("focus", [None, *Phase])
def test_a_snapshot_and_the_tail_are_the_whole_journal(focus: Phase | None) -> None:
    """Continued from a snapshot after every single event: the same actions, and the same state to the last field."""
    for seed in SEEDS:
        world = played(seed, focus)
        whole, stepwise = Controlled(world), Controlled(world)
        told = zip(world.controller.journal, world.controller.done, strict=True)
        for number, ((event, at_s, *_), done) in enumerate(told):
            assert whole.take(event, at_s) == done
            stepwise = Controlled(world, stepwise.snapshot())
            assert stepwise.take(event, at_s) == done, f"seed {seed}, after event {number}: {event}"
        assert stepwise.everything() == whole.everything()
        assert stepwise.real.incidents == world.machine.incidents


@pytest.mark.timeout(600)
def test_the_state_is_the_same_wherever_the_snapshot_is_taken() -> None:
    """At many events of one long job: what is restored is what was there, and it goes on the same for the rest."""
    world = played(11, None)
    chance = random.Random(11)
    journal = world.controller.journal
    cuts = set(chance.sample(range(len(journal)), min(len(journal), 40)))
    whole = Controlled(world)
    others: list[Controlled] = []
    for number, (event, at_s, *_) in enumerate(journal):
        actions = whole.take(event, at_s)
        assert all(other.take(event, at_s) == actions for other in others)
        if number in cuts:
            others.append(Controlled(world, whole.snapshot()))
            assert content(others[-1].real.state) == content(whole.real.state)
    assert others
    assert all(other.everything() == whole.everything() for other in others)
