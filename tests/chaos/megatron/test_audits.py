"""Data parallel ranks of a Megatron job repeat each other's steps: a gradient that is wrong before its reduction is
found, and the end has the bits of an undisturbed job.
"""

from typing import Any

import msgspec
import pytest

from midstep.protocol.types import FaultAction, FlippedBits, InjectionPoint

from ..jobs import inject
from ..test_audits import blamed, flip
from ..test_integrity import assert_same_end
from .conftest import POLICY, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1800)]

PLAIN = Shape(world=3, bf16=True, steps=20)
SHARDED = msgspec.structs.replace(PLAIN, distributed=True)
ONE_NODE: dict[str, Any] = {"nodes": 1, "ranks_per_node": 3}
AUDITS: dict[str, Any] = {**POLICY, "integrity": {"audit_steps": 4, "strikes": 100}}


@pytest.mark.parametrize("shape", [PLAIN, SHARDED], ids=["plain optimizer", "distributed optimizer"])
def test_a_wrong_gradient_is_blamed_on_its_rank_and_the_step_repeated(
    start_megatron: StartMegatron, shape: Shape
) -> None:
    """In a layer, in the backward pass, and in the rank that repeats; and a rank is killed in a repetition."""
    flips = (
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 4),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 8, bits=FlippedBits.SIGN),
        flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 12, bits=FlippedBits.TENSOR),
    )
    calm = start_megatron(shape, **ONE_NODE)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    job = start_megatron(shape, (*flips, inject(1, InjectionPoint.REPLAY, 16)), policy=AUDITS, **ONE_NODE)
    incidents = run_to_its_end(job, incidents=4)["incidents"]
    assert [{each["kind"] for each in incident["reports"]} for incident in incidents[:3]] == [{"gradients_differ"}] * 3
    for incident in incidents[:3]:
        assert incident["pids_before"] == incident["pids_after"], incident
    assert [incident["replaced"] for incident in incidents] == [[], [], [], [1]], job.said()
    assert [incident["steps_lost"] for incident in incidents] == [0] * 4
    assert blamed(job) == {(1, 4), (2, 8), (0, 12)}
    assert_same_end(job.record(), calm.record(), shape.world)


def test_a_step_that_needs_other_ranks_is_refused_at_the_start(start_megatron: StartMegatron) -> None:
    """Tensor parallel ranks compute one gradient together."""
    job = start_megatron(Shape(world=2, tensor=2, steps=4), policy=AUDITS, nodes=1, ranks_per_node=2)
    assert job.wait() != 0
    assert "cannot be repeated by another rank" in job.said()
