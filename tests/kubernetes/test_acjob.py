"""`midstep run` in the pods of an AscendJob, on real kubelets: a pod that is lost comes again, and no bit changes.

The job has the labels of the example. Operator and Volcano are played (`mindcluster`).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import ROOMY, Record
from .acjob import AscendJobOfMidstep, policy_of_example
from .cluster.cluster import Cluster
from .conftest import RANKS, STEPS
from .mindcluster import playing

pytestmark = pytest.mark.timeout(600)

KILLED, DELETED, CRASHED, OFF, END = 20, 50, 80, 110, STEPS - 1


StartInside = Callable[..., AscendJobOfMidstep]


@pytest.fixture
def start_inside(cluster: Cluster, shared: Path) -> Iterator[StartInside]:
    """Start a job of two pods in an AscendJob, with operator and Volcano; it is deleted when the test is over."""
    started: list[AscendJobOfMidstep] = []

    def start(name: str, **options: Any) -> AscendJobOfMidstep:
        policy = {"ladder": ROOMY["ladder"], **policy_of_example()}
        started.append(
            AscendJobOfMidstep(cluster, shared / name, name, others=1, steps=STEPS, policy=policy, **options)
        )
        return started[-1]

    with playing(cluster):
        yield start
        for job in started:
            job.delete()


def test_a_killed_rank_a_deleted_pod_a_failed_pod_and_a_lost_node_change_no_bit(
    start_inside: StartInside, undisturbed: Record
) -> None:
    """There is no spare: the operator's next pod of the same number gets the ranks, and the master keeps its own."""
    gates = (KILLED, DELETED, CRASHED, OFF, END)
    job = start_inside("inside", gates=gates)
    cluster, hit = job.cluster, []

    status = job.held_at(KILLED)
    pod, (rank, *_) = job.victim(status)
    hit.append({rank})
    job.execute(pod, "kill", "-9", str(status["ranks"][rank]["pid"]))
    job.open_gate(KILLED)

    pod, ranks = job.victim(job.held_at(DELETED))
    hit.append(ranks)
    uid, number = job.uid(pod), job.execute(pod, "printenv", "RANK")
    cluster.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    job.until_again(pod, uid)
    assert job.execute(pod, "printenv", "RANK") == number
    job.open_gate(DELETED)

    pod, ranks = job.victim(job.held_at(CRASHED))
    hit.append(ranks)
    uid = job.uid(pod)
    job.crash(pod)
    job.until_again(pod, uid)
    job.open_gate(CRASHED)

    pod, ranks = job.victim(job.held_at(OFF))
    hit.append(ranks)
    uid, machine = job.uid(pod), cluster.machine_of(pod)
    cluster.power_off(machine.number)
    job.until_again(pod, uid)
    assert cluster.machine_of(pod).name != machine.name
    job.open_gate(OFF)
    job.held_at(END)
    cluster.power_on(machine.number)
    job.open_gate(END)

    report = job.finish()
    # A pod that is deleted says that it goes: there is no spare to move to, so nothing is done about that.
    incidents = [incident for incident in report["incidents"] if incident["outcome"] != "dismissed"]
    assert [incident["rung"] for incident in incidents] == ["recover_in_place", *["recover"] * 3]
    for incident, replaced in zip(incidents, hit, strict=True):
        assert_nobody_harmed(incident, replaced, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def test_without_the_master_the_pods_that_follow_continue_from_the_checkpoint(
    start_inside: StartInside, undisturbed: Record
) -> None:
    """The worker ends, too, and is made again: every step that the two repeat gives the same bits."""
    job = start_inside("master", gates=(DELETED, END), shared_directory=False)
    job.held_at(DELETED)
    job.cluster.kubectl("delete", "pod", job.first(), "--grace-period=0", "--force")
    job.open_gate(DELETED)
    job.open_gate(END)
    job.until_complete()
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
