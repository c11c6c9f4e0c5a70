"""Gradients that are wrong before their reduction, in whole jobs: none is applied in an audited step, and the right
rank is blamed.
"""

import random

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.incidents import Incident, Outcome
from midstep.protocol.types import FaultKind
from midstep.testing.invariants import InvariantBroken
from midstep.testing.simulation import faults
from midstep.testing.simulation.audits import OF_AUDITS, wrong_each_time, wrong_once
from midstep.testing.simulation.world import SimulatedWorld

from ..mutants.mutant import Mutant, applied

SEEDS = 12
AUDITS, EVIDENCE = "midstep.processor.audits", "midstep.processor.evidence"


def wrong_now_and_then(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have a rank compute something wrong now and then, and nothing else."""
    for _ in range(6):
        world.timeline.after(chance.uniform(1.5, 9.0), lambda: _tell(world, wrong_once(world, chance)))


def with_other_faults(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have the usual faults happen, too, also in the recovery from a wrong gradient."""
    faults.plan(world, chance, focus)
    wrong_now_and_then(world, chance, focus)


def with_a_wrong_device(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have one rank compute everything wrong from some time on."""
    world.timeline.after(chance.uniform(2.0, 3.0), lambda: _tell(world, wrong_each_time(world, chance)))


def _tell(world: SimulatedWorld, what: str) -> None:
    world.log(f"--- {what}")


def played(seed: int, plan: object) -> SimulatedWorld:
    """Play a job to its end."""
    world = SimulatedWorld(seed, plan=plan, audits=True)  # type: ignore[arg-type]
    world.run()
    return world


def of_audits(world: SimulatedWorld) -> list[Incident]:
    """Return the incidents in which nothing else is reported, as by a network that loses messages.

    Who hears the others leave before it has heard why says that a connection is closed.
    """
    own = {*OF_AUDITS, FaultKind.COMMUNICATION}
    return [each for each in world.machine.incidents if {report.kind for report in each.reports} <= own]


def check_wrong_once(seed: int) -> int:
    """Play a job in which each fault is over at once: it costs the repetition of its step, and no process.

    Its rank is named, also where it was stopped before it had heard that it was wrong.
    """
    world = played(seed, wrong_now_and_then)
    assert world.wrong_gradients.blamed == world.wrong_gradients.caught, world.tell()
    strikes = max(world.wrong_gradients.struck.values(), default=0)
    for incident in of_audits(world):
        assert (incident.outcome, incident.steps_lost) == (Outcome.RESUMED, 0), world.tell()
        assert not incident.replaced or strikes >= world.policy.integrity.strikes, world.tell()
    return world.wrong_gradients.caught


def check_wrong_each_time(seed: int) -> bool:
    """Play a job with a wrong device: in the next audited step its rank moves to a spare, and no other does."""
    world = played(seed, with_a_wrong_device)
    struck = set(world.wrong_gradients.struck)
    if not (struck and world.setting.spares and world.wrong_gradients.caught):
        return False
    ((rank, node),) = struck
    if len(of_audits(world)) < len(world.machine.incidents):
        return False
    (incident,) = of_audits(world)
    each = world.setting.ranks_per_node
    of_node = {*range(rank // each * each, rank // each * each + each)}
    assert (incident.outcome, set(incident.replaced), incident.steps_lost) == (Outcome.RESUMED, of_node, 0)
    assert {fault.report.node for fault in world.machine.status(world.timeline.now).faults} == {node}, world.tell()
    return True


def test_a_gradient_that_is_wrong_once_costs_a_repetition_of_its_step() -> None:
    """In the rank's own step, or in the repetition of another one's. Nothing wrong is applied in an audited step."""
    assert sum(check_wrong_once(seed) for seed in range(SEEDS)) > SEEDS


def test_a_device_that_is_wrong_each_time_is_left_after_the_next_audited_step() -> None:
    """Where a spare is there."""
    assert sum(check_wrong_each_time(seed) for seed in range(SEEDS, 3 * SEEDS)) > SEEDS // 2


def test_other_faults_come_between_audits() -> None:
    """Ranks die, hang and leave in a replay, at its barrier, and in the repetition."""
    assert sum(played(seed, with_other_faults).wrong_gradients.caught for seed in range(3 * SEEDS, 5 * SEEDS)) > 0


def test_where_nothing_is_computed_wrongly_no_audit_finds_anything() -> None:
    """Whatever else fails."""
    for seed in range(5 * SEEDS, 6 * SEEDS):
        world = played(seed, faults.plan)
        kinds = {report.kind for incident in world.machine.incidents for report in incident.reports}
        assert not kinds & {*OF_AUDITS, FaultKind.REFUSED}, world.tell()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 1600, 100))
def test_wrong_gradients_in_many_jobs(first: int) -> None:
    """Alone, with other faults, and on devices that are wrong each time."""
    for seed in range(first, first + 100):
        check_wrong_once(seed)
        check_wrong_each_time(seed)
        played(seed, with_other_faults)


@pytest.mark.parametrize(
    "broken",
    [
        Mutant("what differs is applied", AUDITS, "elif findings.equal:", "elif True:"),
        Mutant("the first of two is right", EVIDENCE, "if most > fewer:", "if True:"),
        Mutant("an earlier step is evidence", AUDITS, "if step != self._doubtful:", "if False:"),
    ],
    ids=lambda broken: broken.name,
)
def test_a_break_of_the_audits_is_seen(broken: Mutant) -> None:
    """Each would have something wrong applied, or a healthy rank blamed."""
    with applied(broken), pytest.raises(InvariantBroken, match=r"no wrong state passes|the right rank is blamed"):
        play_many()


def play_many() -> None:
    """Play jobs with wrong gradients, with other faults and without."""
    for seed in range(10 * SEEDS):
        played(seed, with_other_faults if seed % 2 else wrong_now_and_then)
