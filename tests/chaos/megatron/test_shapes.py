"""A rank is killed at every moment of a step, in Megatron jobs of every shape, and nothing changes but its process."""

from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, Moment

from ..comparing import assert_nobody_harmed, assert_same_numbers
from ..jobs import hurt
from .conftest import StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

DAILY: dict[str, Shape] = {
    "data 4": Shape(),
    "tensor 2 x data 2": Shape(tensor=2),
    "tensor 2 x data 2, 2 optimizer instances, bf16, overlap": Shape(
        tensor=2, distributed=True, instances=2, bf16=True, overlap=True
    ),
}
NIGHTLY: dict[str, Shape] = {
    "data 4, bf16": Shape(bf16=True),
    "data 4, bf16, overlap": Shape(bf16=True, overlap=True),
    "data 4, 2 optimizer instances": Shape(distributed=True, instances=2),
    "data 4, 2 optimizer instances, bf16": Shape(distributed=True, instances=2, bf16=True),
    "data 4, 2 optimizer instances, overlap": Shape(distributed=True, instances=2, overlap=True),
    "tensor 2 x data 2, bf16": Shape(tensor=2, bf16=True),
}
# Who is killed when, and where all resume. A gather that overlaps with the forward pass belongs to the step before.
KILLS: list[tuple[ArmedFault, int]] = [
    (hurt(1, Moment.FORWARD, 2), 2),
    (hurt(2, Moment.BACKWARD, 5), 5),
    (hurt(3, Moment.REDUCTION, 8), 8),
    (hurt(0, Moment.BARRIER, 11), 11),
    (hurt(1, Moment.UPDATE, 14, life=2), 15),
]
GATHER = hurt(2, Moment.GATHER, 17, life=2)
STEPS = 20


def check(start_megatron: StartMegatron, shape: Shape) -> None:
    """Run a shape with and without kills, and compare."""
    shape = Shape(**{**{name: getattr(shape, name) for name in shape.__struct_fields__}, "steps": STEPS})
    kills = [*KILLS]
    if shape.distributed:
        kills.append((GATHER, 17 if shape.overlap else 18))
    calm = start_megatron(shape)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    job = start_megatron(shape, tuple(fault for fault, _ in kills))
    incidents: list[dict[str, Any]] = run_to_its_end(job)["incidents"]
    assert len(incidents) == len(kills), job.said()
    for incident, (fault, step) in zip(incidents, kills, strict=True):
        assert_nobody_harmed(incident, {fault.rank})
        assert incident["resumed_step"] == step, (fault, incident)
    assert_same_numbers(job.record(), calm.record())


@pytest.mark.parametrize("shape", DAILY.values(), ids=list(DAILY))
def test_a_kill_at_any_moment_of_a_step_changes_no_bit(start_megatron: StartMegatron, shape: Shape) -> None:
    """Only the killed rank is replaced, no committed step is lost, and the run ends as an undisturbed one."""
    check(start_megatron, shape)


@pytest.mark.soak
@pytest.mark.parametrize("shape", NIGHTLY.values(), ids=list(NIGHTLY))
def test_a_kill_at_any_moment_of_a_step_changes_no_bit_in_rarer_shapes(
    start_megatron: StartMegatron, shape: Shape
) -> None:
    """Likewise in the rest of the matrix."""
    check(start_megatron, shape)
