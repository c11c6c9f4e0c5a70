"""Ray's head is lost: training continues until Ray's raylets give up, and then on the next cluster."""

import time
from pathlib import Path

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers, assert_same_steps
from ..chaos.jobs import Record
from ..machines.availability import require_machines
from ..machines.conftest import REPOSITORY
from ..machines.job import PATIENCE_S
from ..machines.machines import Machines, why_not
from .cluster import SETTINGS, RayCluster
from .conftest import RANKS, STEPS
from .environment import SUITE
from .job import RayJob

RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAYS_PATIENCE_S = 15  # by default 60
STEP_S = 0.2  # not all steps fit into that time
LOST, MEANWHILE = 5, 20
OF_HEAD = ("gcs_server", "raylet/raylet ", "site-packages/ray/")
_POLL_S = 0.2


def test_training_continues_without_the_head_until_rays_patience_is_over_and_later_on_another_cluster(
    tmp_path: Path, undisturbed: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed meanwhile comes back, and no bit changes. What has started the job says why it ends.

    Another cluster continues the job then, from its newest checkpoint.
    """
    SUITE.require()
    require_machines(why_not())
    monkeypatch.setitem(SETTINGS, RAYS_PATIENCE, str(RAYS_PATIENCE_S))
    with Machines(1 + RANKS, (REPOSITORY, tmp_path)) as machines:
        job = RayJob(RayCluster(machines), tmp_path, nodes=RANKS, spares=0, steps=STEPS, step_s=STEP_S)
        job.until_steps(LOST)
        pids = [rank.pid for rank in job.answer().ranks]
        lost = {pid for word in OF_HEAD for pid in job.pids(machines[0], word)}
        machines[0].run("kill", "-9", *map(str, lost))
        job.kill_rank(1)
        job.until_incidents(1)
        job.until_steps(job.steps_done() + MEANWHILE)
        assert job.answer().ranks[0].pid == pids[0]

        assert job.controller.wait(PATIENCE_S) == 1
        assert f"Failed to connect to GCS within {RAYS_PATIENCE_S} seconds" in (tmp_path / "driver.log").read_text()
        until_gone(job)
        record = job.record()
        assert record.ends == {}
        assert_same_steps(record, undisturbed)
        (incident,) = job.report()["incidents"]
        assert incident["rung"] == "recover_in_place"
        assert_nobody_harmed(incident, {1}, ranks=RANKS)
        assert list((job.directory / "checkpoints").glob("step-*"))

        for machine in machines:
            machine.power_off()
            machine.power_on()
        job.cluster = RayCluster(machines)
        job.resume()
        report = job.finish()
        first, begun_again = report["incidents"]
        assert (first, begun_again["rung"], begun_again["steps_lost"]) == (incident, "reschedule_pod", None)
        assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
        job.assert_nothing_left()


def until_gone(job: RayJob) -> None:
    """Wait until no process of the job is left."""
    deadline = time.monotonic() + PATIENCE_S
    while left := [pid for machine in job.machines for pid in job.pids(machine, job.name)]:
        assert time.monotonic() < deadline, f"{left} are left\n{job.said()}"
        time.sleep(_POLL_S)
