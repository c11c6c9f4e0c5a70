"""A job without spares on real kubelets: what is lost is made again elsewhere, and the survivors wait for it."""

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartManaged
from .managed import ManagedJob, victim

pytestmark = pytest.mark.timeout(900)

CRASHED, DELETED, OFF, END = 20, 60, 100, STEPS - 1


def test_a_crashed_container_a_deleted_pod_and_a_lost_machine_are_replaced_while_the_survivors_wait(
    start_managed: StartManaged, undisturbed: Record
) -> None:
    """The agent's container ends by a signal; a pod is deleted with its time of grace; a machine loses its power."""
    job = start_managed("unspared", step_s=0.05, gates=(CRASHED, DELETED, OFF, END))
    cluster, hit = job.cluster, []

    node, ranks = victim(job, job.held_at(CRASHED))
    hit.append(ranks)
    crash(job, node)
    job.open_gate(CRASHED)

    status = job.held_at(DELETED)
    node, _ = victim(job, status)
    cluster.kubectl("delete", "pod", deleted := job.pod_of(node), "--wait=false")
    job.until_pausing()
    job.open_gate(DELETED)
    job.until(lambda now: all(each["node"] != node for each in now["ranks"]), "the ranks to have moved")
    cluster.until(lambda: deleted not in str(job.pods()), "its pod to be gone")

    node, ranks = victim(job, job.held_at(OFF))
    hit.append(ranks)
    machine = cluster.machine_of(job.pod_of(node))
    cluster.power_off(machine.number)
    job.open_gate(OFF)
    job.held_at(END)
    cluster.power_on(machine.number)
    job.open_gate(END)

    # Where no node was there yet to move to, that is an incident which is dismissed.
    incidents = [each for each in job.finish()["incidents"] if each["outcome"] != "dismissed"]
    crashed, planned, lost = incidents
    assert "signal 9" in str(crashed["reports"]), crashed
    for incident, replaced in zip((crashed, lost), hit, strict=True):
        assert incident["rung"] == "recover"
        assert_nobody_harmed(incident, replaced, ranks=RANKS)
        assert incident["steps_lost"] == 0
    assert planned["steps_lost"] == 0
    assert planned["healthy_pids_kept"]
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    job.cluster.until(lambda: job.left() == [], "nothing to be left")


def crash(job: ManagedJob, node: str) -> None:
    """Kill the agent of a pod from its machine: it is pid 1 there, which takes no SIGKILL from inside."""
    job.cluster.machine_of(job.pod_of(node)).run("pkill", "-9", "-f", "--", f"--job {job.name} --node {node} ")
