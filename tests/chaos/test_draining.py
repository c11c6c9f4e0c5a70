"""Nodes that are not well are left between two steps: nothing is repeated, nobody else notices."""

import time
from collections import Counter
from typing import Any

import psutil
import pytest

from midstep.controller.endpoints.control_requests import Accepted, ReportFaultRequest
from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import RANKS, STEPS, Job, Record

pytestmark = pytest.mark.chaos

GATE = 15
STEP_S = 0.05  # the boundary is a second ahead, and must lie before the last step


def assert_no_step_repeated(job: Job) -> None:
    """Every rank has done every step exactly once."""
    for rank in range(RANKS):
        lines = (job.records / f"steps.{rank}").read_text().splitlines()
        done = Counter(int(line.split()[0]) for line in lines)
        assert done == Counter(range(STEPS)), f"rank {rank}: {done}"


def drain(job: Job, node: str) -> JobStatus:
    """Report a node as not well while all ranks are held in a step; wait until they were told where to stop."""
    job.held_at(GATE)
    level, assertion = FaultLevel.SUB_HEALTH, Assertion.OCCUR
    report = FaultReport(
        FaultKind.NODE, time.time(), "test", "fan 2 is slow", node=node, level=level, assertion=assertion
    )
    assert isinstance(job.ask(ReportFaultRequest(report)), Accepted)
    return job.until(lambda status: status.phase == "pausing", "a boundary")


def assert_drained(job: Job, undisturbed: Record) -> dict[str, Any]:
    """Node1 was left for node2 between two steps, and the numbers are those of a run in which nothing happened."""
    (incident,) = finish(job)["incidents"]
    assert_nobody_harmed(incident, {2, 3})
    assert incident["decisions"][0]["rung"] == "recover"
    assert "node1 is not well (fan 2 is slow)" in incident["decisions"][0]["reason"]
    assert incident["committed_before"] == incident["resumed_step"] > GATE
    assert_no_step_repeated(job)
    assert_same_numbers(job.record(), undisturbed)
    return dict(incident)


def test_a_sub_healthy_node_is_drained_at_a_step_boundary(start_job: StartJob, undisturbed: Record) -> None:
    """Its ranks move to the spare node while the others keep their processes; no step is lost, none is repeated."""
    job = start_job(spares=1, step_s=STEP_S, gates=[GATE])
    before = drain(job, "node1")
    job.open_gate(GATE)
    incident = assert_drained(job, undisturbed)
    moved = {int(rank): pid for rank, pid in incident["pids_before"].items() if int(rank) in {2, 3}}
    assert moved == {rank.rank: rank.pid for rank in before.ranks if rank.rank in {2, 3}}


def test_a_controller_that_dies_during_a_drain_is_replaced_and_the_drain_goes_on(
    start_job: StartJob, undisturbed: Record
) -> None:
    """The next controller knows the boundary from the journal, and where the new processes are."""
    job = start_job(spares=1, step_s=STEP_S, gates=[GATE])
    drain(job, "node1")
    psutil.Process(job.controller_pid()).kill()
    job.until(lambda status: status.term == 2 and status.phase == "pausing", "the next controller")
    job.open_gate(GATE)
    assert_drained(job, undisturbed)
