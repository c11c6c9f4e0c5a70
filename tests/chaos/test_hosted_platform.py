"""A platform of another package makes the nodes: one is taken away, one is killed, and the numbers are the same."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstep.controller.endpoints.control_requests import Accepted, KillNodeRequest
from midstep.controller.endpoints.local_sockets import ask
from midstep.protocol.incidents import JobStatus

from .comparing import assert_nobody_harmed, assert_same_numbers
from .hosted import HostedJob
from .jobs import GONE_S, STATUS_S, Record

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(300)]

FIRST, SECOND = 8, 36
STEP_S = 0.05


@pytest.fixture
def job(tmp_path: Path) -> Iterator[HostedJob]:
    """A job that nothing has been started of."""
    made = HostedJob(tmp_path)
    try:
        yield made
    finally:
        made.close()


def node_of(status: JobStatus, rank: int) -> str:
    return next(node.node for node in status.nodes if rank in node.ranks)


def test_a_node_that_goes_is_left_between_two_steps_and_a_lost_one_is_made_again(
    job: HostedJob, undisturbed: Record
) -> None:
    for step in (FIRST, SECOND):
        job.gate(step).touch()
    job.begin(STEP_S)
    status = job.held_at(FIRST)
    assert sorted(node.state for node in status.nodes) == ["active", "active", "spare"]

    job.take_away(node_of(status, 2))
    job.until(lambda status: status.phase == "pausing", "a boundary")
    job.gate(FIRST).unlink()
    status = job.held_at(SECOND)
    job.until(lambda status: any(node.state == "spare" for node in status.nodes), "the spare that takes its place")
    reply = ask(job.run_directory(), KillNodeRequest(node_of(status, 0)), STATUS_S)
    assert isinstance(reply, Accepted)
    job.until(lambda status: bool(status.incidents), "the loss of the node")
    job.gate(SECOND).unlink()

    assert [job.wait(1), job.wait(2)] == [0, 0], job.said()
    assert_same_numbers(job.record(), undisturbed)
    gone, lost = job.report()["incidents"]
    assert "is going (the rack is serviced, within 600 s)" in gone["decisions"][0]["reason"]
    assert_nobody_harmed(gone, {2, 3})
    assert_nobody_harmed(lost, {0, 1})
    assert [use["used"] for use in job.report()["budgets"] if use["name"] == "recover per job"] == [1]
    deadline = time.monotonic() + GONE_S
    while (left := job.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, job.said()
