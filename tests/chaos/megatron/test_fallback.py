"""What happens when no copy of a shard is left."""

from typing import Any

import psutil
import pytest

from midstep.protocol.types import Moment

from ..comparing import assert_same_numbers
from ..jobs import Job, Record, hurt
from .conftest import PATIENCE_S, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

AT, CHECKPOINT = 15, 10
NIGHTLY = {
    "a rank and its buddy, data 4",
    "one tensor coordinate, tensor 2 x data 2, plain",
    "one piece in both instances, data 4, 2 instances",
}
SHAPES: dict[str, tuple[Shape, tuple[int, int], str]] = {
    # Who holds it, and what it is called.
    "a rank and its buddy, tensor 2 x data 2, bf16": (
        Shape(tensor=2, distributed=True, bf16=True, steps=18),
        (1, 3),
        "optimizer.rank",
    ),
    "a rank and its buddy, data 4": (Shape(distributed=True, steps=18), (0, 2), "optimizer.rank"),
    "one tensor coordinate, tensor 2 x data 2, plain": (Shape(tensor=2, steps=18), (0, 2), "dense.tp0.pp0"),
    "one piece in both instances, data 4, 2 instances": (
        Shape(distributed=True, instances=2, bf16=True, steps=18),
        (1, 3),
        "dense.tp0.pp0.piece1of2",
    ),
}


@pytest.mark.parametrize(
    ("shape", "holders", "shard"),
    [
        pytest.param(*lost, id=name, marks=[pytest.mark.soak, pytest.mark.nightly] if name in NIGHTLY else [])
        for name, lost in SHAPES.items()
    ],
)
def test_when_all_holders_of_a_shard_are_lost_all_go_back_to_the_checkpoint(
    start_megatron: StartMegatron, shape: Shape, holders: tuple[int, int], shard: str
) -> None:
    """Both holders die at once: the two others keep their processes, and the loss of steps is reported."""
    calm = calm_run(start_megatron, shape)
    job = start_megatron(shape, gates=[AT])
    held = job.held_at(AT, PATIENCE_S)
    for rank in holders:
        psutil.Process(held.ranks[rank].pid).kill()
    job.open_gate(AT)
    incident = compared(job, calm)
    assert set(incident["replaced"]) == set(holders), incident
    assert f"no clean copy of shard {shard}" in " ".join(incident["reasons"]), incident


def test_the_buddy_that_dies_while_it_hands_back_a_piece_takes_the_last_copy_along(
    start_megatron: StartMegatron,
) -> None:
    """The loss of the first rank alone costs no step; that of its buddy in the repair sends all to the checkpoint."""
    shape = Shape(tensor=2, distributed=True, bf16=True, steps=18)
    calm = calm_run(start_megatron, shape)
    job = start_megatron(shape, (hurt(1, Moment.BACKWARD, AT), hurt(3, Moment.REPAIR, AT)))
    incident = compared(job, calm)
    assert set(incident["replaced"]) == {1, 3}, incident
    assert len(incident["generations"]) > 1, incident


def calm_run(start_megatron: StartMegatron, shape: Shape) -> Record:
    """Return the record of a job of this shape to which nothing happens."""
    job = start_megatron(shape)
    assert not run_to_its_end(job)["incidents"], job.said()
    return job.record()


def compared(job: Job, calm: Record) -> dict[str, Any]:
    """See that all went back to the checkpoint, and to the numbers of a calm run; return the incident."""
    incidents = run_to_its_end(job)["incidents"]
    assert len(incidents) == 1, job.said()
    incident: dict[str, Any] = incidents[0]
    lost = (incident["restore"], incident["resumed_step"], incident["steps_lost"])
    assert lost == ("checkpoint", CHECKPOINT, AT - CHECKPOINT), incident
    assert incident["healthy_pids_kept"], incident
    assert_same_numbers(job.record(), calm)
    return incident
