"""Hosts are drained or tainted, or their kubelet stops; and two jobs run beside each other."""

from typing import Any

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .cluster.cluster import RESOURCE
from .cluster.image import IMAGE
from .conftest import RANKS, STEPS, StartManaged
from .managed import ManagedJob, pid_on, victim
from .operations import drain, left

pytestmark = pytest.mark.timeout(900)

EVICTED, TAINTED, ILL, KILLED, END = 30, 70, 110, 40, STEPS - 1
TAINT = "midstep.test/maintenance"
CONDITION = "KernelDeadlock"
URGENT = "urgent"


def test_a_drain_a_taint_and_a_condition_move_ranks_between_two_steps_and_no_step_is_repeated(
    start_managed: StartManaged, undisturbed: Record
) -> None:
    options = ("--watch-nodes", "--node-condition", CONDITION)
    job = start_managed("moved", spares=1, step_s=0.05, gates=(EVICTED, TAINTED, ILL, END), options=options)
    cluster = job.cluster

    node, _ = victim(job, job.held_at(EVICTED))
    job.until_spare()
    host = drain(job, node)
    job.until_pausing()
    job.open_gate(EVICTED)
    left(job, node)
    status = job.held_at(TAINTED)
    cluster.kubectl("uncordon", host)
    job.until_spare()

    node, _ = victim(job, status)
    host = cluster.machine_of(job.pod_of(node)).name
    cluster.kubectl("taint", "nodes", host, f"{TAINT}=now:NoExecute")
    job.until_pausing()
    job.open_gate(TAINTED)
    left(job, node)
    status = job.held_at(ILL)
    cluster.kubectl("taint", "nodes", host, f"{TAINT}-")
    job.until_spare()

    node, _ = victim(job, status)
    host = cluster.machine_of(job.pod_of(node)).name
    cluster.set_condition(host, CONDITION, holds=True)
    job.until_pausing()
    job.open_gate(ILL)
    left(job, node)
    job.held_at(END)
    cluster.set_condition(host, CONDITION, holds=False)
    job.open_gate(END)

    incidents = job.finish()["incidents"]
    assert len(incidents) == 3, incidents
    assert all(each["steps_lost"] == 0 and each["healthy_pids_kept"] for each in incidents), incidents
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


@pytest.mark.nightly
def test_a_pod_of_more_importance_gets_the_place_as_soon_as_the_ranks_have_moved(
    start_managed: StartManaged, undisturbed: Record
) -> None:
    """It is preempted: its agent leaves when it has no rank any more, long before its time of grace is over."""
    job = start_managed("preempted", spares=1, step_s=0.05, gates=(EVICTED, END))
    cluster = job.cluster
    node, _ = victim(job, job.held_at(EVICTED))
    job.until_spare()
    cluster.apply(*urgent_pod(cluster.machine_of(job.pod_of(node)).name))
    try:
        job.until_pausing()
        job.open_gate(EVICTED)
        left(job, node)
        cluster.until(lambda: f"the agent of {node} ends: it was asked to leave" in job.output.read_text(), "its agent")
        job.held_at(END)
        cluster.until(lambda: cluster.get("pod", URGENT)["status"]["phase"] == "Running", "the other pod to run")
        job.open_gate(END)
        (incident,) = job.finish()["incidents"]
    finally:
        cluster.kubectl("delete", f"pod/{URGENT}", f"priorityclass/{URGENT}", "--grace-period=0", "--force")
    assert incident["steps_lost"] == 0
    assert incident["healthy_pids_kept"]
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def urgent_pod(host: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a pod that needs all devices of a host, and its priority."""
    container = {"name": "it", "image": IMAGE, "command": ["sleep", "600"], "resources": {"limits": {RESOURCE: "8"}}}
    spec = {"priorityClassName": URGENT, "nodeSelector": {"kubernetes.io/hostname": host}, "containers": [container]}
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": URGENT}, "spec": spec}
    return {**priority, "metadata": {"name": URGENT}}, pod


@pytest.mark.nightly
def test_training_and_the_recovery_of_a_process_need_no_kubelet(
    start_managed: StartManaged, undisturbed: Record
) -> None:
    """A kubelet that stands still takes nothing from a job; a rank on its host is killed meanwhile."""
    job = start_managed("stopped", step_s=0.05, gates=(KILLED, END))
    cluster = job.cluster
    status = job.held_at(KILLED)
    node, (rank, *_) = victim(job, status)
    machine = cluster.machine_of(job.pod_of(node))
    cluster.stop_kubelet(machine.number)
    cluster.until(lambda: not is_ready(job, machine.name), "Kubernetes to give the host up")
    machine.run("kill", "-9", pid_on(machine, status["ranks"][rank]["pid"]))
    job.open_gate(KILLED)
    job.held_at(END)
    cluster.continue_kubelet(machine.number)
    cluster.until(lambda: is_ready(job, machine.name), "the host to be back")
    job.open_gate(END)

    (incident,) = job.finish()["incidents"]
    assert incident["rung"] == "recover_in_place"
    assert_nobody_harmed(incident, {rank}, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def is_ready(job: ManagedJob, host: str) -> bool:
    """Return whether Kubernetes takes a host for ready."""
    conditions = job.cluster.get("node", host)["status"]["conditions"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def test_two_jobs_in_one_namespace_do_not_disturb_each_other(start_managed: StartManaged, undisturbed: Record) -> None:
    jobs = [start_managed(name, gates=(KILLED, END)) for name in ("left", "right")]
    killed = []
    for job in jobs:
        status = job.held_at(KILLED)
        node, (rank, *_) = victim(job, status)
        killed.append(rank)
        job.execute(node, "kill", "-9", str(status["ranks"][rank]["pid"]))
        job.open_gate(KILLED)
    for job, rank in zip(jobs, killed, strict=True):
        job.held_at(END)
        job.open_gate(END)
        (incident,) = job.finish()["incidents"]
        assert incident["rung"] == "recover_in_place"
        assert_nobody_harmed(incident, {rank}, ranks=RANKS)
        assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
        assert job.left() == []
