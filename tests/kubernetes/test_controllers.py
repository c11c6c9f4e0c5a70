"""Several controllers of a job in Kubernetes, in an etcd or by a Lease: one leads, and another one takes over."""

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .cluster.cluster import PATIENCE_S, Cluster
from .conftest import RANKS, STEPS, StartManaged
from .operations import leader

pytestmark = pytest.mark.timeout(900)

KILLED, OFF, ROLLED, HIT = 20, 80, STEPS - 1, 1


@pytest.mark.parametrize("kept", ["on the volume", pytest.param("in an etcd", marks=pytest.mark.nightly)])
def test_another_controller_leads_when_the_leaders_pod_or_machine_is_lost_or_all_are_replaced(
    cluster: Cluster, start_managed: StartManaged, undisturbed: Record, kept: str
) -> None:
    """The pod together with a rank, then the machine with all that is on it: no step is lost, no bit differs.

    At last `kubectl rollout restart` replaces both, one after the other: the job has a leader until its end.
    """
    several: tuple[str, ...] = ("--controllers", "2")
    several += ("--store", cluster.store) if kept == "in an etcd" else ()
    name = "several" if kept == "in an etcd" else "elected"
    job = start_managed(name, spares=1, step_s=0.05, gates=(KILLED, OFF, ROLLED), options=several)
    status = job.held_at(KILLED)
    job.until_spare()
    first = leader(job, 1)
    cluster.kubectl("delete", "pod", first, "--grace-period=0", "--force", "--wait=false")
    job.execute(status["ranks"][HIT]["node"], "kill", "-9", str(status["ranks"][HIT]["pid"]))
    job.open_gate(KILLED)

    job.held_at(OFF)
    second = leader(job, 2)
    assert second != first
    machine = cluster.machine_of(second)
    cluster.power_off(machine.number)
    job.open_gate(OFF)
    job.held_at(ROLLED)
    cluster.power_on(machine.number)
    third = leader(job, 3)
    assert third not in {first, second}
    cluster.kubectl("rollout", "restart", f"deployment/midstep-{job.name}")
    cluster.kubectl("rollout", "status", f"deployment/midstep-{job.name}", limit_s=PATIENCE_S)
    assert leader(job, 4, 5) != third  # the one that stood by may have led before it was replaced itself
    report = job.report_of_controller()
    job.open_gate(ROLLED)

    job.end_well()
    killed, *lost = report["incidents"]
    assert killed["rung"] == "recover_in_place"
    assert_nobody_harmed(killed, {HIT}, ranks=RANKS)
    assert all(each["rung"] == "recover" and each["steps_lost"] == 0 for each in lost), lost
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    assert job.left() == []
    if kept == "on the volume":
        assert len(job.report()["incidents"]) == len(report["incidents"])  # from the volume, with no controller
