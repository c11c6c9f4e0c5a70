"""Jobs inside jobs of Ray: what `ray job submit` brings, and a worker of Ray Train."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers, assert_same_steps
from ..chaos.jobs import Record
from ..machines.availability import require_machines
from ..machines.conftest import REPOSITORY
from ..machines.machines import Machines, why_not
from .cluster import RayCluster
from .conftest import RANKS, STEPS
from .environment import SUITE
from .submitted import JobInRayTrain, SubmittedJob

KILLED, STOPPED = 20, 40
SLOW_S = 0.2  # Ray takes a second or two to hand a stop on


class ClusterForJobs(RayCluster):
    """A cluster to which jobs are submitted."""

    takes_jobs = True


@pytest.fixture(scope="module")
def jobs_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A Ray cluster that takes jobs."""
    SUITE.require()
    require_machines(why_not())
    with Machines(1 + RANKS, (REPOSITORY, tmp_path_factory.getbasetemp())) as machines:
        yield ClusterForJobs(machines)


@pytest.mark.parametrize("kind", [SubmittedJob, JobInRayTrain])
def test_a_killed_rank_changes_no_bit_and_ray_sees_nothing_of_it(
    kind: type[SubmittedJob], jobs_cluster: RayCluster, tmp_path: Path, undisturbed: Record
) -> None:
    """The script is a name in the folder that Ray copies to the machines; the job of Ray succeeds."""
    job = kind(jobs_cluster, tmp_path, nodes=RANKS, spares=0, steps=STEPS, gates=(KILLED,))
    try:
        job.held_at(KILLED)
        job.kill_rank(1)
        job.until_incidents(1)
        job.open_gate(KILLED)
        (incident,) = job.finish()["incidents"]
        assert incident["rung"] == "recover_in_place"
        assert_nobody_harmed(incident, {1}, ranks=RANKS)
        assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
        assert "succeeded" in job.jobs("status")
        assert "all ranks have finished" in job.jobs("logs")
        job.assert_nothing_left()
    finally:
        job.close()


def test_ray_job_stop_stops_the_job_with_a_checkpoint(
    jobs_cluster: RayCluster, tmp_path: Path, undisturbed: Record
) -> None:
    """Ray gives the driver three seconds; the job takes itself away whatever they were enough for."""
    job = SubmittedJob(jobs_cluster, tmp_path, nodes=RANKS, spares=0, steps=STEPS, step_s=SLOW_S, gates=(STOPPED,))
    try:
        job.held_at(STOPPED)
        job.jobs("stop", "--no-wait")
        job.open_gate(STOPPED)  # who waits there follows no order
        job.until_taken_away()
        report = job.report()
        assert report["exit_code"] == 130
        assert report["incidents"] == []
        stopped_at = len(job.record().steps[0])
        assert (job.directory / "checkpoints" / f"step-{stopped_at:08}").is_dir()
        assert_same_steps(job.record(), undisturbed)
    finally:
        job.close()
