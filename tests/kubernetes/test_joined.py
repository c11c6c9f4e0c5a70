"""`midstep run --rdzv-endpoint` in a user's own pods, on real kubelets: what is lost is replaced, no bit changes."""

from typing import Any

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import ROOMY, Record
from .conftest import RANKS, STEPS, StartJoined
from .joined import FIRST, JoinedJob

pytestmark = pytest.mark.timeout(900)

KILLED, CRASHED, DELETED, OFF, END = 20, 50, 80, 110, STEPS - 1


def victim(job: JoinedJob, status: dict[str, Any]) -> tuple[str, set[int]]:
    """Return a pod that has ranks and not the controller, and its ranks."""
    node = next(rank["node"] for rank in status["ranks"] if not rank["node"].startswith(FIRST))
    return job.pod_of(node), {rank["rank"] for rank in status["ranks"] if rank["node"] == node}


def test_a_killed_rank_a_crashed_container_a_deleted_pod_and_a_lost_machine_change_no_bit(
    start_joined: StartJoined, undisturbed: Record
) -> None:
    """One job through all of them: only what was hit is replaced, and Kubernetes brings a spare for the next loss."""
    gates = (KILLED, CRASHED, DELETED, OFF, END)
    job = start_joined("joined", others=2, gates=gates, policy={"ladder": ROOMY["ladder"]})
    hit: list[set[int]] = []

    status = job.held_at(KILLED)
    job.until_spare()
    pod, (rank, *_) = victim(job, status)
    job.open_gate(KILLED)
    job.execute(pod, "kill", "-9", str(status["ranks"][rank]["pid"]))
    hit.append({rank})

    pod, ranks = victim(job, job.held_at(CRASHED))
    hit.append(ranks)
    job.crash(pod)
    job.open_gate(CRASHED)

    pod, ranks = victim(job, job.held_at(DELETED))
    hit.append(ranks)
    job.until_spare()
    job.cluster.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    job.open_gate(DELETED)

    pod, ranks = victim(job, job.held_at(OFF))
    hit.append(ranks)
    job.until_spare()
    machine = job.cluster.machine_of(pod)
    job.cluster.power_off(machine.number)
    job.open_gate(OFF)
    job.held_at(END)
    job.cluster.power_on(machine.number)
    job.until_spare()  # a pod that comes when the job is over finds nobody, and tries for `join_timeout`
    job.open_gate(END)

    report = job.finish()
    assert [incident["rung"] for incident in report["incidents"]] == ["recover_in_place", *["recover"] * 3]
    for incident, ranks in zip(report["incidents"], hit, strict=True):
        assert_nobody_harmed(incident, ranks, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def test_without_the_pod_of_the_controller_the_pods_that_follow_continue_from_the_checkpoint(
    start_joined: StartJoined, undisturbed: Record
) -> None:
    """They are a new job of the same checkpoints: every step that they repeat gives the same bits."""
    job = start_joined("continued", others=1, gates=(DELETED, END), shared_directory=False)
    job.held_at(DELETED)
    job.cluster.kubectl("delete", "pod", job.first(), "--grace-period=0", "--force")
    job.open_gate(DELETED)
    job.open_gate(END)
    job.until_complete()
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
