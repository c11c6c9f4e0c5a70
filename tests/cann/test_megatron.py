"""midstep's Megatron adapter on torch-npu's own device and process groups, bit for bit."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.chaos.comparing import assert_nobody_harmed, assert_same_numbers
from tests.chaos.jobs import Job
from tests.chaos.losing import closing
from tests.chaos.megatron.training import Shape

from midstep.protocol.faults import ArmedFault, FaultAction, InjectionPoint

from .environment import require_cann
from .test_jobs import IN_PLACE, POLICY, RETRY, ended, harm

JOB_S = 900.0
STEPS = 16
SCRIPT = Path(__file__).with_name("megatron_training.py")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

SHAPES = {
    "data 2, overlap, bf16": Shape(world=2, steps=STEPS, overlap=True, bf16=True, micro_batches=1, device="npu"),
    "tensor 2 x data 2, a buddy, bf16": Shape(
        steps=STEPS, tensor=2, distributed=True, bf16=True, micro_batches=1, device="npu"
    ),
}
# What happens, the rungs taken, who is replaced.
CASES: list[tuple[ArmedFault, list[str], set[int]]] = [
    (harm(1, FaultAction.KILL, InjectionPoint.BACKWARD, 2), IN_PLACE, {1}),
    (harm(0, FaultAction.MEMORY_PERSISTENT, InjectionPoint.FORWARD, 5), RETRY, set()),
    (harm(0, FaultAction.KILL, InjectionPoint.UPDATE, 8), IN_PLACE, {0}),
    (harm(1, FaultAction.LINK_DOWN, InjectionPoint.COLLECTIVE, 11, life=2), RETRY, set()),
]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_faults_of_a_megatron_job_take_their_rungs_and_change_no_bit(tmp_path: Path, shape: Shape) -> None:
    """Weights, optimizer, gradients' norms and random numbers are those of an undisturbed run."""
    require_cann()
    with closing() as keep:
        calm = keep(job(tmp_path / "calm", shape, []))
        assert not ended(calm, JOB_S)["incidents"], calm.said()
        hurt = keep(job(tmp_path / "hurt", shape, [fault for fault, _, _ in CASES]))
        incidents = ended(hurt, JOB_S)["incidents"]
        assert len(incidents) == len(CASES), hurt.said()
        for incident, (_, rungs, replaced) in zip(incidents, CASES, strict=True):
            taken = [decision["rung"] for decision in incident["decisions"]]
            assert list(dict.fromkeys(taken)) == rungs, incident["reasons"]
            assert_nobody_harmed(incident, replaced, ranks=shape.world)
        assert_same_numbers(hurt.record(), calm.record(), ranks=shape.world)


def job(root: Path, shape: Shape, faults: list[ArmedFault]) -> Job:
    """Start a job of a shape on one machine."""
    root.mkdir()
    arguments = [str(root / "records"), msgspec.json.encode(shape).decode()]
    where: dict[str, Any] = {"nodes": 1, "ranks_per_node": shape.world, "device": "npu"}
    return Job(root, script=SCRIPT, arguments=arguments, policy=POLICY, faults=faults, **where)
