"""A gradient that is wrong before its reduction: a rank that repeats the step computes another one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import PATIENCE_S, ROOMY, Job
from .test_integrity import assert_same_end

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("audited.py")
AUDITS: dict[str, Any] = {**ROOMY, "integrity": {"audit_steps": 4, "strikes": 100}}
STEPS = 20


def flip(rank: int, action: FaultAction, point: InjectionPoint, step: int | None, **options: Any) -> ArmedFault:
    """Return a flip of what a rank computes."""
    return ArmedFault(rank, action, point, step, **options)


def run(start_job: StartJob, ranks: int, faults: Sequence[ArmedFault], **options: Any) -> Job:
    """Run a job with these flips, and one without; both end with the same bits."""
    shape = {"nodes": 1, "ranks_per_node": ranks, "script": SCRIPT, "steps": STEPS, "step_s": 0.0}
    calm = start_job(**shape)
    assert calm.wait(PATIENCE_S) == 0, calm.said()
    job = start_job(faults=faults, **{**shape, "policy": AUDITS, **options})
    assert job.wait(PATIENCE_S) == 0, job.said()
    assert_same_end(job.record(), calm.record(), ranks)
    return job


def wrong(report: dict[str, Any]) -> list[int]:
    """Return the ranks that were blamed for a wrong gradient, in the order of the reports."""
    return [int(each) for line in report for each in line]


def test_a_wrong_gradient_is_blamed_on_its_rank_and_the_step_repeated(start_job: StartJob) -> None:
    """In a layer, in the backward pass, and in the rank that repeats: each once."""
    flips = [
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 8),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 12, bits=FlippedBits.SIGN),
        flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 16, bits=FlippedBits.TENSOR),
    ]
    job = run(start_job, 3, flips)
    incidents = finish(job)["incidents"]
    assert [{each["kind"] for each in incident["reports"]} for incident in incidents] == [{"gradients_differ"}] * 3
    for incident in incidents:
        assert (incident["outcome"], incident["steps_lost"]) == ("resumed", 0), incident
        assert incident["pids_before"] == incident["pids_after"], incident
    for rank, step in ((1, 8), (2, 12), (0, 16)):
        assert f"rank {rank} computed a wrong gradient in step {step}" in job.said()
    assert job.said().count("computed a wrong gradient") == 3
