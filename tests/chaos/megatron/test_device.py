"""Megatron's groups on the device: tensor and expert parallel ones come back resumed, and rebuilt with a newcomer."""

import pytest

from midstep.protocol.types import FaultAction, InjectionPoint

from ..comparing import assert_nobody_harmed, assert_same_numbers
from ..jobs import inject
from .conftest import StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(900)]

SHAPES = {
    "tensor 2 x data 2": Shape(tensor=2, steps=16),
    "expert 2 x data 2": Shape(expert=2, experts=4, steps=16),
}
# A link fails while all live, so that communicators are resumed; with a newcomer they are rebuilt.
FAULTS = (
    (inject(2, InjectionPoint.COLLECTIVE, 4, action=FaultAction.LINK_DOWN), "retry_step", set[int]()),
    (inject(1, InjectionPoint.BACKWARD, 8), "recover_in_place", {1}),
    (inject(3, InjectionPoint.BACKWARD, 12, action=FaultAction.LINK_DOWN), "retry_step", set[int]()),
)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_tensor_and_expert_groups_come_back_resumed_and_rebuilt(start_megatron: StartMegatron, shape: Shape) -> None:
    """After a broken link, a killed rank and another broken link, every step is that of an undisturbed run."""
    calm = start_megatron(shape, device="fake", nodes=1, ranks_per_node=shape.world)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    job = start_megatron(shape, tuple(fault for fault, *_ in FAULTS), device="fake")
    incidents = run_to_its_end(job)["incidents"]
    assert [incident["rung"] for incident in incidents] == [rung for _, rung, _ in FAULTS], job.said()
    for incident, (fault, _, replaced) in zip(incidents, FAULTS, strict=True):
        assert_nobody_harmed(incident, replaced)
        assert incident["resumed_step"] == fault.step
    assert_same_numbers(job.record(), calm.record())
