"""Data parallel ranks of a Megatron job repeat each other's steps: a gradient that is wrong before its reduction is
found, and the end has the bits of an undisturbed job.
"""

import os
from typing import Any

import msgspec
import pytest

from midstep.protocol.types import FaultAction, FlippedBits, InjectionPoint

from ..jobs import inject
from ..test_audits import blamed, flip, many_flips
from ..test_integrity import assert_same_end
from .conftest import POLICY, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1800)]

FLIPS = int(os.environ.get("MIDSTEP_FLIPS", "15"))  # the table in docs/integrity.md has 100
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


TOGETHER = {
    "tensor": Shape(tensor=2, bf16=True, distributed=True, steps=20),
    "pipeline": Shape(pipeline=2, steps=20),
    "interleaved pipeline": Shape(pipeline=2, virtual=2, layers=4, steps=20),
    "expert": Shape(expert=2, experts=4, steps=20),
    "context": Shape(context=2, bf16=True, steps=20),
}


@pytest.mark.parametrize("shape", TOGETHER.values(), ids=TOGETHER)
def test_of_ranks_that_compute_together_the_one_is_blamed_that_was_wrong(
    start_megatron: StartMegatron, shape: Shape
) -> None:
    """Though what it gets wrong reaches the others of its replica in the same step, and their gradients differ, too."""
    flips = (
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 8, bits=FlippedBits.TENSOR),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 12, bits=FlippedBits.SIGN),
        flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 16, bits=FlippedBits.TENSOR),
    )
    one_node = {"nodes": 1, "ranks_per_node": shape.world}
    calm = start_megatron(shape, **one_node)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    job = start_megatron(shape, flips, policy=AUDITS, **one_node)
    incidents = run_to_its_end(job, incidents=3)["incidents"]
    for incident in incidents:
        assert incident["pids_before"] == incident["pids_after"], incident
    assert len(incidents) == 3, job.said()
    assert blamed(job) == {(1, 8), (2, 12), (0, 16)}
    assert_same_end(job.record(), calm.record(), shape.world)


@pytest.mark.parametrize("shape", [TOGETHER["tensor"], TOGETHER["pipeline"]], ids=["tensor", "pipeline"])
def test_each_of_many_wrong_gradients_is_blamed_on_its_rank(start_megatron: StartMegatron, shape: Shape) -> None:
    """All kinds, all bits, all ranks, one flip every second step.

    Some bits of an activation are lost in the next rounding, and dropout would drop more. None else may be missed: the
    end is that of an undisturbed job, and each step is audited.
    """
    flips = many_flips(shape.world, FLIPS)
    longer = msgspec.structs.replace(shape, steps=10 + 2 * FLIPS, dropout=0.0)
    one_node = {"nodes": 1, "ranks_per_node": shape.world}
    calm = start_megatron(longer, **one_node)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    policy = {**POLICY, "integrity": {"audit_steps": 1, "strikes": 1000}}
    job = start_megatron(longer, tuple(flips), policy=policy, **one_node)
    incidents = run_to_its_end(job, incidents=FLIPS)["incidents"]
    found, all_flips = blamed(job), {(each.rank, each.step): each for each in flips}
    assert found <= all_flips.keys()
    lost = [each for place, each in all_flips.items() if place not in found]
    assert all((each.action, each.bits) == (FaultAction.FLIP_ACTIVATION, FlippedBits.ONE) for each in lost), lost
    assert sum(len(each["generations"]) for each in incidents) == FLIPS - len(lost) > FLIPS * 0.9
    assert all(each["pids_before"] == each["pids_after"] for each in incidents)
    assert_same_end(job.record(), calm.record(), shape.world)


def test_ranks_that_are_lost_in_audited_steps_blame_no_rank(start_megatron: StartMegatron) -> None:
    """In a repetition of two ranks that compute together, in a pass, in a reduction, at the barrier, in the gather."""
    shape = msgspec.structs.replace(TOGETHER["tensor"], steps=26)
    kills = (
        inject(1, InjectionPoint.REPLAY, 4),
        inject(2, InjectionPoint.FORWARD, 8),
        inject(0, InjectionPoint.REDUCTION, 12),
        inject(3, InjectionPoint.BARRIER, 16),
        inject(1, InjectionPoint.GATHER, 20, life=2),
    )
    one_node = {"nodes": 1, "ranks_per_node": shape.world}
    calm = start_megatron(shape, **one_node)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    policy = {**POLICY, "integrity": {"audit_steps": 2}}
    job = start_megatron(shape, kills, policy=policy, **one_node)
    incidents = run_to_its_end(job, incidents=len(kills))["incidents"]
    assert [incident["replaced"] for incident in incidents] == [[each.rank] for each in kills], job.said()
    assert blamed(job) == set()
    assert_same_end(job.record(), calm.record(), shape.world)


def test_a_model_of_which_there_is_one_copy_is_refused_at_the_start(start_megatron: StartMegatron) -> None:
    """No other ranks could repeat the step of these."""
    job = start_megatron(Shape(world=2, tensor=2, steps=4), policy=AUDITS, nodes=1, ranks_per_node=2)
    assert job.wait() != 0
    assert "cannot be repeated by other ranks" in job.said()
