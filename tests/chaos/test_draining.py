"""Nodes that are not well are left between two steps: nothing is repeated, nobody else notices."""

import time
from collections import Counter
from typing import Any, NamedTuple

import psutil
import pytest

from midstep.controller.endpoints.control_requests import Accepted, ReportFaultRequest
from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import RANKS, STEPS, Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

FIRST, SECOND = 8, 36  # gates
STEP_S = 0.05  # the boundary is a second ahead, and must lie before the next gate, and before the last step


def assert_no_step_repeated(job: Job) -> None:
    """Every rank has done every step exactly once."""
    for rank in range(RANKS):
        lines = (job.records / f"steps.{rank}").read_text().splitlines()
        done = Counter(int(line.split()[0]) for line in lines)
        assert done == Counter(range(STEPS)), f"rank {rank}: {done}"


def drain(job: Job, node: str, gate: int) -> JobStatus:
    """Report a node as not well while all ranks are held in a step; wait until they were told where to stop."""
    job.held_at(gate)
    level, assertion = FaultLevel.SUB_HEALTH, Assertion.OCCUR
    report = FaultReport(
        FaultKind.NODE, time.time(), "test", "fan 2 is slow", node=node, level=level, assertion=assertion
    )
    assert isinstance(job.ask(ReportFaultRequest(report)), Accepted)
    return job.until(lambda status: status.phase == "pausing", "a boundary")


class Drained(NamedTuple):
    """A job of which two nodes have been drained, the statuses before, and the incidents."""

    job: Job
    before: tuple[JobStatus, JobStatus]
    incidents: list[dict[str, Any]]


@pytest.fixture(scope="module")
def drained(start_shared_job: StartJob) -> Drained:
    """Two nodes are drained one after the other, and the controller dies during the second drain."""
    job = start_shared_job(spares=2, step_s=STEP_S, gates=[FIRST, SECOND])
    first = drain(job, "node1", FIRST)
    job.open_gate(FIRST)
    second = drain(job, "node2", SECOND)
    psutil.Process(job.controller_pid()).kill()
    job.until(lambda status: status.term == 2 and status.phase == "pausing", "the next controller")
    job.open_gate(SECOND)
    return Drained(job, (first, second), finish(job)["incidents"])


@pytest.mark.parametrize("number", [0, 1])
def test_a_sub_healthy_node_is_drained_at_a_step_boundary(drained: Drained, number: int) -> None:
    """Its ranks move to a spare node while the others keep their processes, and no step is lost."""
    assert len(drained.incidents) == 2
    incident, before = drained.incidents[number], drained.before[number]
    assert_nobody_harmed(incident, {2, 3})
    assert incident["decisions"][0]["rung"] == "recover"
    assert f"node{number + 1} is not well (fan 2 is slow)" in incident["decisions"][0]["reason"]
    assert incident["committed_before"] == incident["resumed_step"] > (FIRST, SECOND)[number]
    moved = {int(rank): pid for rank, pid in incident["pids_before"].items() if int(rank) in {2, 3}}
    assert moved == {rank.rank: rank.pid for rank in before.ranks if rank.rank in {2, 3}}


def test_a_controller_that_dies_during_a_drain_is_replaced_and_the_drain_goes_on(drained: Drained) -> None:
    """The next controller knows the boundary from the journal, and where the new processes are."""
    assert drained.before[1].term == 1
    assert drained.incidents[1]["outcome"] == "resumed"
    assert drained.job.report()["exit_code"] == 0


def test_drains_repeat_no_step_and_change_no_bit(drained: Drained, undisturbed: Record) -> None:
    """The numbers are those of a run in which nothing happened."""
    assert_no_step_repeated(drained.job)
    assert_same_numbers(drained.job.record(), undisturbed)
