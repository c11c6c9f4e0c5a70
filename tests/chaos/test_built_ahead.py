"""`standby.depth: built`: a killed rank's next process had run the script before the kill, and no bit is different."""

from typing import Any

import pytest

from midstep.protocol.types import InjectionPoint

from .built import built, wait_until_built
from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, RANKS, ROOMY, Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.both_devices(second_in_soak=True), pytest.mark.timeout(300)]

# The rank that is killed first at a point, how often it has been replaced by then, and where.
KILLS = {
    12: (1, 1, InjectionPoint.COLLECTIVE),
    20: (0, 1, InjectionPoint.FORWARD),
    28: (1, 2, InjectionPoint.UPDATE),
    36: (3, 1, InjectionPoint.BARRIER),
    44: (2, 1, InjectionPoint.BACKWARD),
}
AGAIN = inject(2, InjectionPoint.REPAIR, None, life=2)  # the built process dies as well; what follows it was not built
FAULTS = [*(inject(rank, point, step, life=life) for step, (rank, life, point) in KILLS.items()), AGAIN]
GATES = [step - 2 for step in KILLS]


@pytest.fixture(scope="module")
def job(start_shared_job: StartJob) -> Job:
    job = start_shared_job(policy={**ROOMY, "standby": {"depth": "built"}}, faults=FAULTS, gates=GATES, **ONE_NODE)
    for kills, step in enumerate(GATES):
        job.held_at(step)
        wait_until_built(job, RANKS + kills)
        job.open_gate(step)
    return job


@pytest.fixture(scope="module")
def incidents(job: Job) -> list[dict[str, Any]]:
    incidents: list[dict[str, Any]] = finish(job)["incidents"]
    assert len(incidents) == len(KILLS), job.said()
    return incidents


def test_the_process_that_was_built_for_a_rank_takes_its_place(job: Job, incidents: list[dict[str, Any]]) -> None:
    """No other process changes, and no committed step is lost."""
    before = built(job)
    for (step, (rank, _, point)), incident in zip(KILLS.items(), incidents, strict=True):
        assert_nobody_harmed(incident, {rank})
        assert incident["resumed_step"] == step + (point is InjectionPoint.UPDATE)
        assert (before.get(incident["pids_after"][str(rank)]) == rank) is (incident is not incidents[-1])


def test_built_processes_change_no_bit(job: Job, incidents: list[dict[str, Any]], undisturbed: Record) -> None:
    assert incidents
    assert_same_numbers(job.record(), undisturbed)
