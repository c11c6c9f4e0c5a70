"""Requests to stop, while the last checkpoint of a job is being written"""

import pytest

from midstep.controller.recovery.events import Finish, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Policy, RungPolicy
from midstep.protocol.messages import CheckpointSaved
from midstep.protocol.types import FaultKind, Rung
from midstep.testing.fake_cluster import FakeCluster

from .attack import attack


@pytest.fixture
def cluster() -> FakeCluster:
    """A running job on two nodes of two ranks, with a spare node."""
    return FakeCluster().start()


def save(job: FakeCluster) -> None:
    """Have all ranks that are asked to write do so."""
    for ranks in ((1, 2, 3), (0,)):
        job.feed(*(CheckpointSaved(rank, job.machine.generation, 7, "/ck") for rank in ranks))


def reason(job: FakeCluster) -> str:
    """Return why the job is over."""
    finish = job.log[-1]
    assert isinstance(finish, Finish)
    return finish.reason


@attack(
    "a terminal is closed, or asked again, while a job that was asked to stop is saving",
    holds="the checkpoint is completed; only a request that insists, after another one, does without it",
)
def test_a_request_that_does_not_insist_never_costs_the_checkpoint(cluster: FakeCluster) -> None:
    """However often it comes, and whoever has asked before."""
    cluster.feed(StopRequested("Ctrl-C"))
    cluster.feed(*(cluster.quiesced(rank, 7) for rank in range(4)))
    cluster.feed(*(StopRequested("SIGHUP", insist=False) for _ in range(3)))
    assert cluster.machine.phase is Phase.SAVING
    save(cluster)
    assert "an emergency checkpoint of step 7 is at /ck" in reason(cluster)


def test_a_second_request_that_insists_ends_the_job_at_once(cluster: FakeCluster) -> None:
    """Without its checkpoint, and it says so."""
    cluster.feed(StopRequested("SIGHUP", insist=False))
    cluster.feed(*(cluster.quiesced(rank, 7) for rank in range(4)))
    cluster.feed(StopRequested("midstep stop by me"))
    assert reason(cluster) == "midstep stop by me; without a checkpoint, as it was asked for twice"


@attack(
    "`midstep stop`, Ctrl-C or a closed terminal while a job is saving because its ladder has come to its end",
    holds="the first request does not cost the checkpoint; the reason and the exit code stay those of the fault",
)
@pytest.mark.parametrize("insist", [False, True])
def test_the_first_request_leaves_a_job_that_is_ending_to_save(insist: bool) -> None:
    """It was asked once, and not twice."""
    job = FakeCluster(policy=Policy(ladder=(RungPolicy(Rung.STOP),)))
    job.start()
    job.feed(job.fault(1, FaultKind.EXCEPTION))
    job.feed(*(job.quiesced(rank, 7) for rank in (0, 2, 3)))
    assert job.machine.phase is Phase.SAVING
    job.feed(StopRequested("once", insist=insist))
    assert job.machine.phase is Phase.SAVING
    for ranks in ((2, 3), (0,)):
        job.feed(*(CheckpointSaved(rank, job.machine.generation, 7, "/ck") for rank in ranks))
    finish = job.log[-1]
    assert isinstance(finish, Finish)
    assert finish.exit_code == 1
    assert "an emergency checkpoint of step 7 is at /ck" in finish.reason
