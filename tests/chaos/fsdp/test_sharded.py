"""A rank of a sharded model is lost at every moment of a step: only it is replaced, and every bit is as without it."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..built import built, wait_until_built
from ..comparing import assert_nobody_harmed, assert_same_numbers, finish
from ..jobs import inject
from ..losing import incidents_of
from .conftest import PATIENCE_S, POLICY, PRELOAD, WORLD, Loss, StartSharded, check_losses, undisturbed
from .training import Setting

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(500)]

REDUCE_SCATTER = "reduce_scatter_single"
ALL_GATHER = "all_gather_single"


def lost(rank: int, point: InjectionPoint, step: int, **how: Any) -> Loss:
    """Return the loss of one rank in a step, which all repeat."""
    return Loss((inject(rank, point, step, **how),), {rank}, step)


def in_update(rank: int, step: int, **how: Any) -> Loss:
    """Return the loss of one rank in its update, which the others have done: nothing is repeated."""
    return Loss((inject(rank, InjectionPoint.UPDATE, step, **how),), {rank}, step + 1)


def in_collective(rank: int, operation: str, step: int) -> Loss:
    """Return the loss of one rank in a certain collective of a step."""
    fault = ArmedFault(rank, FaultAction.KILL, InjectionPoint.COLLECTIVE, step, 1, operation=operation)
    return Loss((fault,), {rank}, step)


def test_a_rank_with_a_copy_in_another_row_comes_back_from_it(start_sharded: StartSharded) -> None:
    """In forward, reduce-scatter, backward and update; survivors keep their processes.

    The train function draws a random number each time that it is called, which moves none of the numbers of its steps.
    """
    losses = (
        lost(1, InjectionPoint.FORWARD, 2),
        in_collective(3, REDUCE_SCATTER, 4),
        lost(0, InjectionPoint.BACKWARD, 6),
        in_update(2, 8),
    )
    check_losses(start_sharded, Setting(mesh=(2, 2), steps=10), losses, nodes=1, ranks_per_node=WORLD)


def test_a_process_that_was_built_ahead_has_rehearsed_its_update_and_no_bit_changes(
    start_sharded: StartSharded,
) -> None:
    """It was built on groups without links, and what it rehearsed leaves its parameters and moments alone."""
    setting = Setting(mesh=(2, 2), steps=8)
    calm = undisturbed(start_sharded, setting)
    policy = {**POLICY, "standby": {"preload": PRELOAD, "depth": "built"}}
    faults = [inject(1, InjectionPoint.BACKWARD, 5)]
    job = start_sharded(setting, faults, gates=[4], policy=policy, nodes=1, ranks_per_node=WORLD)
    job.held_at(4, PATIENCE_S)
    wait_until_built(job, WORLD)
    job.open_gate(4)
    (incident,) = incidents_of(job, [], PATIENCE_S)
    assert_nobody_harmed(incident, {1}, ranks=WORLD)
    assert (incident["resumed_step"], built(job)[incident["pids_after"]["1"]]) == (5, 1)
    assert_same_numbers(job.record(), calm, ranks=WORLD)


def test_without_a_copy_all_go_back_to_the_checkpoint_in_place(start_sharded: StartSharded) -> None:
    """Steps that are done again give the same bits. The layout check has said at start what it would cost."""
    faults = [inject(1, InjectionPoint.BACKWARD, 6)]
    job = start_sharded(Setting(mesh=(2,), steps=7), faults, nodes=1, ranks_per_node=2)
    assert job.wait(PATIENCE_S) == 0, job.said()
    (incident,) = finish(job)["incidents"]
    assert (incident["outcome"], incident["restore"]) == ("resumed", "checkpoint"), incident
    assert incident["resumed_step"] == 4
    assert set(incident["replaced"]) == {1}
    assert incident["healthy_pids_kept"]
    assert [len(found) for steps in job.record().steps.values() for found in steps.values()] == [1] * 2 * 7
    assert "only rank 1 holds its pieces" in job.said()


EVERY_MOMENT = (
    lost(1, InjectionPoint.FORWARD, 2),
    in_collective(2, ALL_GATHER, 4),
    lost(3, InjectionPoint.BACKWARD, 6),
    in_collective(0, REDUCE_SCATTER, 8),
    in_collective(1, "allreduce", 10),
    lost(2, InjectionPoint.BARRIER, 12),
    in_update(3, 14),
    lost(0, InjectionPoint.FORWARD, 16, action=FaultAction.RAISE),
    lost(1, InjectionPoint.BACKWARD, 18, action=FaultAction.STOP),
)
SETTINGS = {
    "plain": Setting(mesh=(2, 2)),
    "bf16 and three micro-batches": Setting(mesh=(2, 2), bf16=True, micro_batches=3),
    "gathered parameters are kept after forward": Setting(mesh=(2, 2), reshard=False),
    "activations are recomputed": Setting(mesh=(2, 2), recompute=True, layers=3),
    "four rows of one": Setting(mesh=(4, 1)),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", SETTINGS)
def test_every_moment_of_a_step_in_many_settings(start_sharded: StartSharded, name: str) -> None:
    """Killed, stopped, and ended by an exception."""
    moments = (
        EVERY_MOMENT if SETTINGS[name].mesh[-1] > 1 else tuple(each for each in EVERY_MOMENT if not _gathers(each))
    )
    check_losses(start_sharded, msgspec.structs.replace(SETTINGS[name], steps=20), _each_in_its_life(moments))


def _each_in_its_life(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    """Return losses of one rank each, with the incarnation that holds it by then."""
    lives: Counter[int] = Counter()
    found = []
    for loss in losses:
        (fault,) = loss.faults
        lives[fault.rank] += 1
        found.append(loss._replace(faults=(msgspec.structs.replace(fault, incarnation=lives[fault.rank]),)))
    return tuple(found)


def _gathers(loss: Loss) -> bool:
    """Return whether it is in a collective between columns."""
    return loss.faults[0].operation in {ALL_GATHER, REDUCE_SCATTER}


IN_A_RECOVERY = (
    Loss((inject(1, InjectionPoint.FORWARD, 2), inject(0, InjectionPoint.REPAIR, 2)), {0, 1}, 2),
    Loss((inject(2, InjectionPoint.BACKWARD, 5), inject(1, InjectionPoint.ROLLBACK, 5, life=2)), {1, 2}, 5),
    Loss((inject(3, InjectionPoint.FORWARD, 8), inject(3, InjectionPoint.REBUILD, None, life=2)), {3}, 8),
)


@pytest.mark.soak
def test_a_second_rank_is_lost_while_the_first_is_brought_back(start_sharded: StartSharded) -> None:
    """Of another shard, of which a copy is left, and the newcomer itself."""
    check_losses(start_sharded, Setting(mesh=(2, 2), steps=10), IN_A_RECOVERY)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mesh", "victims"), [((2, 2), (1, 3)), ((4,), (2,))], ids=["both holders of a piece", "the only holder of one"]
)
def test_where_no_copy_is_left_the_checkpoint_is_taken(
    start_sharded: StartSharded, mesh: tuple[int, ...], victims: tuple[int, ...]
) -> None:
    """In place, and the end is the same bit for bit."""
    setting = Setting(mesh=mesh, steps=9)
    calm = undisturbed(start_sharded, setting)
    job = start_sharded(setting, [inject(victim, InjectionPoint.FORWARD, 6) for victim in victims])
    assert job.wait(PATIENCE_S) == 0, job.said()
    (incident,) = finish(job)["incidents"]
    assert (incident["outcome"], incident["restore"]) == ("resumed", "checkpoint"), incident
    assert (incident["resumed_step"], incident["steps_lost"]) == (4, 2), incident
    assert incident["healthy_pids_kept"]
    assert_same_numbers(job.record(), calm, ranks=WORLD)


@pytest.mark.soak
def test_a_lost_node_takes_no_piece_with_it_that_another_has_not(start_sharded: StartSharded) -> None:
    """A spare takes its ranks."""
    setting = Setting(mesh=(2, 2), steps=9)
    calm = undisturbed(start_sharded, setting)
    fault = inject(2, InjectionPoint.BACKWARD, 5, action=FaultAction.KILL_NODE)
    job = start_sharded(setting, [fault], spares=1)
    assert job.wait(PATIENCE_S) == 0, job.said()
    (incident,) = finish(job)["incidents"]
    assert (incident["outcome"], incident["restore"], incident["steps_lost"]) == ("resumed", "replica", 0), incident
    assert set(incident["replaced"]) == {2, 3}
    assert_same_numbers(job.record(), calm, ranks=WORLD)
