"""A reschedule ends all processes, and loses no committed step where the healthy ones hold everything."""

from typing import Any

import pytest

from midstep.protocol.types import InjectionPoint

from .comparing import assert_same_numbers, finish
from .conftest import StartJob
from .jobs import RANKS, ROOMY, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

KILLED_AT = 27  # the checkpoint before it is of step 20
LADDER = [{"rung": "reschedule_job", "attempts": 2, "budget": {"per_job": 5}}, {"rung": "stop"}]
ONLY_RESCHEDULE: dict[str, Any] = {**ROOMY, "ladder": LADDER}


@pytest.mark.soak
def test_a_kill_under_a_policy_that_only_reschedules_loses_no_committed_step(
    start_job: StartJob, undisturbed: Record
) -> None:
    """The survivors save first; all processes start again on new nodes, and end with the same bits."""
    faults = [inject(1, InjectionPoint.FORWARD, KILLED_AT)]
    job = start_job(policy=ONLY_RESCHEDULE, faults=faults, fixed_nodes=False)
    (incident,) = finish(job)["incidents"]
    assert incident["outcome"] == "resumed"
    assert incident["rung"] == "reschedule_job"
    assert (incident["resumed_step"], incident["steps_lost"]) == (KILLED_AT, 0)
    assert set(incident["replaced"]) == set(range(RANKS))
    said = f"an emergency checkpoint of step {KILLED_AT} is at {job.directory / 'checkpoints'}"
    assert said in " ".join(incident["reasons"])
    assert_same_numbers(job.record(), undisturbed)
