"""Bits that flip in whole jobs, with nothing raised: no wrong state passes a vote, and the right rank is blamed."""

import random

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.incidents import Outcome
from midstep.protocol.types import FaultKind
from midstep.testing.invariants import InvariantBroken
from midstep.testing.simulation import faults
from midstep.testing.simulation.corruption import FLIPS, wrong_device
from midstep.testing.simulation.process_faults import kill_rank
from midstep.testing.simulation.world import SimulatedWorld

from ..mutants.mutant import Mutant, applied

SEEDS = 15
# What was sent in an attempt that failed had a voice, and lost memory was compared with what had come in its place.
ONCE_BLAMED_A_HEALTHY_RANK = (1545, 1625, 1747, 1765)
ONCE_PASSED_IN_A_NEW_PROCESS = 20645  # it took memory that had changed by itself for its script's doing
BALLOT, VOTES = "midstep.processor.ballot", "midstep.processor.votes"


def flips_alone(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have a bit flip now and then, at any moment, and nothing else."""
    for _ in range(4):
        world.timeline.after(chance.uniform(1.0, 8.0), lambda: _flip(world, chance))


def with_flips(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have the usual faults happen, too, also in the recovery from a flip."""
    faults.plan(world, chance, focus)
    for _ in range(6):
        world.injector.when_well(chance.choice(FLIPS))
    flips_alone(world, chance, focus)


def with_a_kill_in_the_same_step(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have a bit flip, and a process die less than two steps later: often before the vote, or in the way back."""
    for _ in range(4):
        flip_s = chance.uniform(1.5, 8.0)
        world.timeline.after(flip_s, lambda: _flip(world, chance))
        world.timeline.after(flip_s + chance.uniform(0.0, 0.2), lambda: _kill(world, chance))


def with_a_wrong_device(world: SimulatedWorld, chance: random.Random, focus: Phase | None) -> None:
    """Have one rank get each update wrong."""
    world.timeline.after(chance.uniform(1.5, 3.0), lambda: world.log(wrong_device(world, chance)))


def _flip(world: SimulatedWorld, chance: random.Random) -> None:
    if world.controller.finish is None:
        world.log(f"--- {chance.choice(FLIPS)(world, chance)}")


def _kill(world: SimulatedWorld, chance: random.Random) -> None:
    if world.controller.finish is None:
        world.log(f"--- {kill_rank(world, chance)}")


def played(seed: int, plan: object) -> SimulatedWorld:
    """Play a job to its end."""
    world = SimulatedWorld(seed, plan=plan, integrity=True)  # type: ignore[arg-type]
    world.run()
    return world


def test_what_flips_is_found() -> None:
    """No healthy rank is replaced for it: the invariants say so after each event."""
    assert sum(played(seed, flips_alone).corruption.found for seed in range(SEEDS)) > SEEDS // 2


def test_other_faults_come_between() -> None:
    """Ranks die, hang and leave before a vote, in it, and in the recovery from it."""
    assert sum(played(seed, with_flips).corruption.found for seed in range(SEEDS, 3 * SEEDS)) > SEEDS // 2


@pytest.mark.parametrize("seed", ONCE_BLAMED_A_HEALTHY_RANK)
def test_what_came_in_a_repair_that_failed_blames_no_healthy_rank(seed: int) -> None:
    """The invariants say so after each event."""
    assert played(seed, with_flips).corruption.flips


def test_memory_that_changes_in_the_first_step_of_a_new_process_passes_no_vote() -> None:
    """The invariants say so after each event."""
    assert played(ONCE_PASSED_IN_A_NEW_PROCESS, with_flips).corruption.flips


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1500, 1800, 50))
def test_other_faults_come_between_in_many_jobs(first: int) -> None:
    """No healthy rank is blamed, and no wrong state passes: the invariants say so after each event."""
    assert sum(played(seed, with_flips).corruption.found for seed in range(first, first + 50)) > 0


def test_a_process_dies_in_the_step_of_a_flip() -> None:
    """The flipped one, or another: what it leaves may have been served to the next process of a rank."""
    assert sum(played(seed, with_a_kill_in_the_same_step).corruption.found for seed in range(SEEDS)) > SEEDS // 2


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_processes_die_in_the_step_of_a_flip_in_many_jobs(first: int) -> None:
    """No healthy rank is blamed, and no wrong state passes."""
    for seed in range(first, first + 50):
        played(seed, with_a_kill_in_the_same_step)


def test_a_rank_that_gets_each_update_wrong_is_moved_and_its_node_left() -> None:
    """Where a spare is there."""
    moved = 0
    for seed in range(3 * SEEDS, 4 * SEEDS):
        world = played(seed, with_a_wrong_device)
        left = {fault.report.node for fault in world.machine.status(world.timeline.now).faults if fault.report.node}
        struck = {node for _, node in world.corruption.struck}
        ended = [each for each in world.machine.incidents if each.outcome is Outcome.RESUMED]
        if world.setting.spares and struck and len(ended) >= world.policy.integrity.strikes:
            moved += 1
            assert left & struck, world.tell()
    assert moved > SEEDS // 4


def test_where_nothing_flips_nothing_is_found() -> None:
    """Whatever else fails."""
    for seed in range(4 * SEEDS, 5 * SEEDS):
        world = played(seed, faults.plan)
        kinds = {report.kind for incident in world.machine.incidents for report in incident.reports}
        assert not kinds & {FaultKind.ODD_COPY, FaultKind.COPIES_DIFFER}
        assert world.corruption.found == 0


@pytest.mark.parametrize(
    "broken",
    [
        Mutant("a copy that was sent has a voice", VOTES, "received=self._received,", "received=frozenset(),"),
        Mutant("the copy of the majority is always exact", BALLOT, "self.agreed >= state - 1", "True"),
        Mutant("the second hash is left out", VOTES, "if self._steady and found else ()", "if False else ()"),
    ],
    ids=lambda broken: broken.name,
)
def test_a_break_of_the_votes_is_seen(broken: Mutant) -> None:
    """Each would have a wrong state pass, or a healthy rank blamed."""
    with applied(broken), pytest.raises(InvariantBroken, match=r"no wrong state passes|the right rank is blamed"):
        play_many()


def play_many() -> None:
    """Play jobs with flips, with other faults and without."""
    for seed in range(20 * SEEDS):
        played(seed, with_flips if seed % 2 else flips_alone)
