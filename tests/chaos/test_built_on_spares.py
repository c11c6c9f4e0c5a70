"""`standby.depth: built` with a spare: a lost node's ranks continue in processes that had run the script before."""

import os
import signal
from typing import Any, NamedTuple

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


class Moved(NamedTuple):
    """A job that has lost a node, and which processes were built, for which ranks, before its controller was killed."""

    job: Job
    before: dict[int, int]
    incident: dict[str, Any]


@pytest.fixture(scope="module")
def moved(start_shared_job: StartJob) -> Moved:
    job = start_shared_job(policy={**ROOMY, "standby": {"depth": "built"}}, spares=1, gates=[STEP])
    job.held_at(STEP)
    job.until(has_built, f"{SPARE} to have built ranks {MOVED}")
    before = built(job)
    os.kill(job.controller_pid(), signal.SIGKILL)
    job.until(lambda status: status.term == 2 and has_built(status), f"the next controller to hear from {SPARE}")
    job.kill_node(LOST)
    job.open_gate(STEP)
    incidents: list[dict[str, Any]] = finish(job)["incidents"]
    assert len(incidents) == 1, job.said()
    return Moved(job, before, incidents[0])


def test_the_ranks_of_a_lost_node_move_into_processes_that_its_spare_has_built(moved: Moved) -> None:
    """No other process changes, and no committed step is lost; the decision says so.

    The controller is another one than that which had them built.
    """
    incident = moved.incident
    assert_nobody_harmed(incident, MOVED)
    assert incident["resumed_step"] == STEP
    assert {moved.before.get(incident["pids_after"][str(rank)]) for rank in MOVED} == MOVED
    assert f"to spare node {SPARE}, with ranks 0, 1 built ahead there" in incident["decisions"][-1]["reason"]


def test_it_is_said_what_processes_ahead_cost(moved: Moved) -> None:
    """In the log of the job, of each depth, and of the spare by its name."""
    said = moved.job.said()
    assert "the modules of the next process are imported: " in said
    assert f"{SPARE}: the next processes of ranks 0, 1 are built ahead: " in said


def test_what_a_spare_has_built_changes_no_bit(moved: Moved, undisturbed: Record) -> None:
    assert_same_numbers(moved.job.record(), undisturbed)
