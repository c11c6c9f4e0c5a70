"""`standby.depth: built` with a spare: a lost node's ranks continue in processes that had run the script before."""

from typing import Any

import pytest

from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import StandbyDepth

from .built import built
from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ROOMY, Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.both_devices(second_in_soak=True), pytest.mark.timeout(300)]

STEP = 20
SPARE, LOST, MOVED = "node2", "node0", {0, 1}  # rank 0 is a rank as any other


def has_built(status: JobStatus) -> bool:
    """The spare says that it has built the ranks of the first node."""
    (spare,) = [node for node in status.nodes if node.node == SPARE]
    return any(each.depth is StandbyDepth.BUILT and set(each.ranks) == MOVED for each in spare.prepared)


@pytest.fixture(scope="module")
def job(start_shared_job: StartJob) -> Job:
    job = start_shared_job(policy={**ROOMY, "standby": {"depth": "built"}}, spares=1, gates=[STEP])
    job.held_at(STEP)
    job.until(has_built, f"{SPARE} to have built ranks {MOVED}")
    job.kill_node(LOST)
    job.open_gate(STEP)
    return job


@pytest.fixture(scope="module")
def incident(job: Job) -> dict[str, Any]:
    incidents: list[dict[str, Any]] = finish(job)["incidents"]
    assert len(incidents) == 1, job.said()
    return incidents[0]


def test_the_ranks_of_a_lost_node_move_into_processes_that_its_spare_has_built(
    job: Job, incident: dict[str, Any]
) -> None:
    """No other process changes, and no committed step is lost; the decision says so."""
    assert_nobody_harmed(incident, MOVED)
    assert incident["resumed_step"] == STEP
    before = built(job)
    assert {before.get(incident["pids_after"][str(rank)]) for rank in MOVED} == MOVED
    assert f"to spare node {SPARE}, with ranks 0, 1 built ahead there" in incident["decisions"][-1]["reason"]


def test_it_is_said_what_processes_ahead_cost(job: Job, incident: dict[str, Any]) -> None:
    """In the log of the job, of each depth, and of the spare by its name."""
    assert incident
    said = job.said()
    assert "the modules of the next process are imported: " in said
    assert f"{SPARE}: the next processes of ranks 0, 1 are built ahead: " in said


def test_what_a_spare_has_built_changes_no_bit(job: Job, incident: dict[str, Any], undisturbed: Record) -> None:
    assert incident
    assert_same_numbers(job.record(), undisturbed)
