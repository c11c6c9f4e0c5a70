"""Where no copy of a shard is left, or no rung of the ladder, training continues from a checkpoint."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import pytest

from midstep.protocol.types import InjectionPoint

from ..comparing import assert_same_numbers, assert_same_steps
from ..jobs import Job, Record, inject
from .conftest import PATIENCE_S, POLICY, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

AT, CHECKPOINT = 15, 10
AGAIN_AT, SECOND_CHECKPOINT = 25, 20
WITH_A_BUDDY = Shape(tensor=2, distributed=True, bf16=True, steps=28)
ONE_EACH = [{"rung": "recover_in_place", "budget": {"per_rank": 1}}, {"rung": "stop"}]
CalmRun = Callable[[Shape], Record]
SHAPES: dict[str, tuple[Shape, tuple[int, int], str]] = {
    # Who holds it, and what it is called.
    "a rank and its buddy, data 4": (Shape(distributed=True, steps=18), (0, 2), "optimizer.rank"),
    "one tensor coordinate, tensor 2 x data 2, plain": (Shape(tensor=2, steps=18), (0, 2), "dense.tp0.pp0"),
    "one piece in both instances, data 4, 2 instances": (
        Shape(distributed=True, instances=2, bf16=True, steps=18),
        (1, 3),
        "dense.tp0.pp0.piece1of2",
    ),
}


@pytest.fixture(scope="module")
def calm_run(start_megatron: StartMegatron) -> CalmRun:
    """Return the record of a job of a shape to which nothing happens; each shape runs once."""

    @functools.cache
    def run(shape: Shape) -> Record:
        job = start_megatron(shape, nodes=1, ranks_per_node=shape.world)  # the same bits, and up sooner
        assert not run_to_its_end(job)["incidents"], job.said()
        return job.record()

    return run


@pytest.mark.soak
@pytest.mark.nightly
@pytest.mark.parametrize(("shape", "holders", "shard"), SHAPES.values(), ids=list(SHAPES))
def test_when_all_holders_of_a_shard_are_lost_all_go_back_to_the_checkpoint(
    start_megatron: StartMegatron, calm_run: CalmRun, shape: Shape, holders: tuple[int, int], shard: str
) -> None:
    """Both holders die at once: the two others keep their processes, and the loss of steps is reported."""
    job = start_megatron(shape, gates=[AT])
    lose(job, holders)
    (incident,) = compared(job, calm_run(shape), [(AT, CHECKPOINT)])
    assert set(incident["replaced"]) == set(holders), incident
    assert f"no clean copy of shard {shard}" in " ".join(incident["reasons"]), incident


@pytest.mark.soak
def test_a_rank_and_its_buddy_that_are_lost_send_all_to_the_checkpoint_whether_at_once_or_in_the_repair(
    start_megatron: StartMegatron, calm_run: CalmRun
) -> None:
    """The loss of the first rank alone costs no step; that of its buddy, as it hands back a piece, is the last copy."""
    later = inject(1, InjectionPoint.BACKWARD, AGAIN_AT, life=2), inject(3, InjectionPoint.REPAIR, AGAIN_AT, life=2)
    job = start_megatron(WITH_A_BUDDY, later, gates=[AT])
    lose(job, (1, 3))
    losses = [(AT, CHECKPOINT), (AGAIN_AT, SECOND_CHECKPOINT)]
    at_once, in_the_repair = compared(job, calm_run(WITH_A_BUDDY), losses)
    for incident in (at_once, in_the_repair):
        assert set(incident["replaced"]) == {1, 3}, incident
    assert "no clean copy of shard optimizer.rank" in " ".join(at_once["reasons"]), at_once
    assert len(in_the_repair["generations"]) > 1, in_the_repair


@pytest.mark.soak
def test_a_new_job_goes_on_bit_for_bit_from_what_was_saved_when_the_ladder_ended(
    start_megatron: StartMegatron, calm_run: CalmRun
) -> None:
    """A rank dies once more than its budget allows: the job stops at the last committed step, with a checkpoint."""
    faults = inject(1, InjectionPoint.BACKWARD, 4), inject(1, InjectionPoint.FORWARD, AT, life=2)
    stopped = start_megatron(WITH_A_BUDDY, faults, policy={**POLICY, "ladder": ONE_EACH})
    assert stopped.wait(PATIENCE_S) == 1, stopped.said()
    reason = stopped.report()["reason"]
    assert "budget per_rank of rank 1 is spent" in reason, reason
    assert f"an emergency checkpoint of step {AT} is at" in reason, reason
    assert_same_steps(stopped.record(), calm_run(WITH_A_BUDDY))

    saved = {"directory": str(stopped.directory / "checkpoints"), "every_steps": 1000}
    job = start_megatron(WITH_A_BUDDY, policy={**POLICY, "checkpoint": saved})
    assert not run_to_its_end(job)["incidents"], job.said()
    assert {min(steps) for steps in job.record().steps.values()} == {AT}
    assert_same_numbers(job.record(), calm_run(WITH_A_BUDDY))


def lose(job: Job, holders: tuple[int, int]) -> None:
    """Kill two ranks that stand in front of a step, at once."""
    held = job.held_at(AT, PATIENCE_S)
    for rank in holders:
        psutil.Process(held.ranks[rank].pid).kill()
    job.open_gate(AT)


def compared(job: Job, calm: Record, losses: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """See that all went back from each step to its checkpoint, and to the numbers of a calm run; return incidents."""
    incidents: list[dict[str, Any]] = run_to_its_end(job, incidents=len(losses))["incidents"]
    assert len(incidents) == len(losses), job.said()
    for incident, (at, checkpoint) in zip(incidents, losses, strict=True):
        lost = (incident["restore"], incident["resumed_step"], incident["steps_lost"])
        assert lost == ("checkpoint", checkpoint, at - checkpoint), incident
        assert incident["healthy_pids_kept"], incident
    assert_same_numbers(job.record(), calm)
    return incidents
