"""`midstep run --platform kubernetes` on real kubelets: what is lost is replaced, what is to go is left in time."""

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartManaged
from .managed import victim

pytestmark = pytest.mark.timeout(900)

KILLED, FORCED, OFF, DELETED, END = 20, 50, 80, 110, STEPS - 1


def test_a_killed_rank_a_forced_pod_a_deleted_pod_and_a_lost_machine_change_no_bit(
    start_managed: StartManaged, undisturbed: Record
) -> None:
    """One job through all of them, with a spare that midstep makes again each time; nothing is left in the end."""
    job = start_managed("managed", spares=1, step_s=0.05, gates=(KILLED, FORCED, OFF, DELETED, END))
    cluster, hit = job.cluster, []

    status = job.held_at(KILLED)
    job.until_spare()
    node, (rank, *_) = victim(job, status)
    hit.append({rank})
    job.execute(node, "kill", "-9", str(status["ranks"][rank]["pid"]))
    job.open_gate(KILLED)

    status = job.held_at(FORCED)
    shown = {
        (f"{kind}/midstep-managed{name}", "RecoverInPlace") for kind, name in (("Deployment", ""), ("Pod", f"-{node}"))
    }
    cluster.until(lambda: job.events() == shown, "the Events of the incident")
    node, ranks = victim(job, status)
    hit.append(ranks)
    cluster.kubectl("delete", "pod", job.pod_of(node), "--grace-period=0", "--force")
    job.open_gate(FORCED)

    node, ranks = victim(job, job.held_at(OFF))
    hit.append(ranks)
    job.until_spare()
    machine = cluster.machine_of(job.pod_of(node))
    cluster.power_off(machine.number)
    job.open_gate(OFF)
    status = job.held_at(DELETED)
    cluster.power_on(machine.number)
    job.until_spare()

    node, _ = victim(job, status)
    cluster.kubectl("delete", "pod", job.pod_of(node), "--wait=false")
    job.until_pausing()
    job.open_gate(DELETED)
    job.until(lambda now: all(each["node"] != node for each in now["ranks"]), "the ranks to have moved")
    job.held_at(END)
    job.open_gate(END)

    report = job.finish()
    assert [each["rung"] for each in report["incidents"]] == ["recover_in_place", "recover", "recover", "recover"]
    *unplanned, planned = report["incidents"]
    for incident, replaced in zip(unplanned, hit, strict=True):
        assert_nobody_harmed(incident, replaced, ranks=RANKS)
    assert planned["steps_lost"] == 0, planned
    assert planned["healthy_pids_kept"], planned
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    assert job.left() == []


@pytest.mark.nightly
def test_without_a_spare_the_survivors_wait_for_a_new_pod(start_managed: StartManaged, undisturbed: Record) -> None:
    job = start_managed("alone", gates=(KILLED, END))
    node, ranks = victim(job, job.held_at(KILLED))
    job.cluster.kubectl("delete", "pod", job.pod_of(node), "--grace-period=0", "--force")
    job.open_gate(KILLED)
    job.held_at(END)
    job.open_gate(END)

    (incident,) = job.finish()["incidents"]
    assert incident["rung"] == "recover"
    assert_nobody_harmed(incident, ranks, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def test_deleting_the_owner_ends_the_job_and_leaves_nothing(start_managed: StartManaged) -> None:
    job = start_managed("deleted", gates=(KILLED,))
    job.held_at(KILLED)
    assert len(job.pods()) == 2
    job.delete()

    job.cluster.until(lambda: job.process.poll() is not None, "midstep run to end")
    assert job.process.returncode == 1
    job.cluster.until(lambda: job.left() == [], "nothing to be left")


def test_ctrl_c_ends_the_following_and_not_the_job(start_managed: StartManaged) -> None:
    job = start_managed("followed", gates=(KILLED,))
    job.held_at(KILLED)
    job.cluster.machines[0].run("sh", "-c", "kill -INT $(pgrep -f 'job followed' | head -1)")
    job.cluster.until(lambda: job.process.poll() is not None, "midstep run to end")

    assert job.process.returncode == 130
    assert len(job.pods()) == 2


@pytest.mark.nightly
def test_what_a_budget_has_paid_stays_paid_when_the_controllers_pod_is_deleted(start_managed: StartManaged) -> None:
    """The first rank is restarted in place, which the policy allows once; the next one moves, with its node."""
    once = {"rung": "recover_in_place", "budget": {"per_job": 1}}
    policy = {"ladder": [once, {"rung": "recover"}, {"rung": "stop"}]}
    job = start_managed("counted", spares=1, step_s=0.05, gates=(KILLED, FORCED), policy=policy)
    for gate in (KILLED, FORCED):
        status = job.held_at(gate)
        job.until_spare()
        node, (rank, *_) = victim(job, status)
        job.execute(node, "kill", "-9", str(status["ranks"][rank]["pid"]))
        job.open_gate(gate)
        if gate == KILLED:
            job.held_at(FORCED)
            (pod,) = job.controller_pods()
            job.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1")

    in_place, moved = job.finish()["incidents"]
    assert in_place["rung"] == "recover_in_place"
    assert moved["rung"] == "recover"
    assert "per_job" in str(moved["decisions"])
