"""Controllers on several machines, with their journal in etcd on the same ones: each of them can be lost."""

import time
from pathlib import Path

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from ..etcd.server import require_etcd
from .conftest import RANKS, STEPS, StartMachines, run_undisturbed
from .etcd_job import CONTROLLERS, PATIENCE_S, EtcdJob
from .machines import cables_are_bad

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

OUTAGE_S, LONG_OUTAGE_S = 10.0, 60.0
HOUR_S = 3600.0
HELD = (100, 200, 270)  # a job without a leader trains on: at these steps it waits for what the test does
# Training continues while this test looks at it; on bad cables a step takes a second.
MANY_STEPS = 400 if cables_are_bad() else 1200
POLICY = "checkpoint: {every_steps: 50}\nstall: {grace_s: 120}\n"


def test_the_machine_of_the_leader_is_lost_and_the_next_one_is_cut_off_and_training_continues(
    start_machines: StartMachines, tmp_path: Path, undisturbed: Record
) -> None:
    """A rank is killed each time, just before: what the lost leader has begun, the next one finishes.

    The first leader was promoted by an admin on another machine.
    """
    require_etcd()
    began_s = time.time()
    gates = [tmp_path / "records" / f"gate.{step}" for step in HELD]
    gates[0].parent.mkdir()
    for gate in gates:
        gate.touch()
    job = EtcdJob(start_machines(5), tmp_path, steps=STEPS, policy=POLICY)
    founder = job.leader(1)
    first = (founder + 1) % CONTROLLERS
    job.until_steps(10)
    job.until_all_stand_by(founder)
    assert f"{job.machines[first].name} leads in term 2" in job.promote(first), job.said()
    job.until_steps(20)
    before = job.status(first)
    job.kill_rank(1, before)
    job.machines[first].power_off()

    second = job.leader(3)
    gates[0].unlink()
    job.until_steps(job.steps_done() + 30)
    job.machines[first].power_on()
    job.start_member(first)
    job.controllers[first] = job.start_controller(first)
    gates[1].unlink()
    job.until_steps(job.steps_done() + 20)

    job.kill_rank(0, job.status(second))
    job.machines[second].cut()
    third = job.leader(4)
    gates[2].unlink()
    job.until_steps(job.steps_done() + 30)
    job.machines[second].heal()
    assert job.controllers[second].wait(60) == 70, job.said()
    job.until_over()

    report = job.report(third)
    assert [incident["rung"] for incident in report["incidents"]] == ["recover_in_place"] * 2
    for incident, rank in zip(report["incidents"], (1, 0), strict=True):
        assert_nobody_harmed(incident, {rank}, ranks=RANKS)
        assert abs(incident["began_s"] - began_s) < PATIENCE_S, "each machine has a monotonic clock of its own"
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def test_wall_clocks_of_controllers_are_hours_apart_and_jump_and_nothing_changes(
    start_machines: StartMachines, tmp_path: Path
) -> None:
    """The leader's jumps ahead and back; the next one's is an hour ahead, the third's behind, amid a recovery each."""
    require_etcd()
    job = EtcdJob(start_machines(5), tmp_path, steps=MANY_STEPS, policy=POLICY, wall_clocks=[0.0] * CONTROLLERS)
    first = job.leader(1)
    others = {*range(CONTROLLERS)} - {first}
    job.set_wall_clock(first, HOUR_S)
    job.until_steps(10)
    job.kill_rank(1, job.status(first))
    job.until_steps(job.steps_done() + 20)
    job.set_wall_clock(first, -HOUR_S)
    job.until_steps(job.steps_done() + 10)
    before = job.status(first)
    assert before["term"] == 1, job.said()

    for number in others:
        job.set_wall_clock(number, HOUR_S)
    job.kill_rank(0, before)
    job.machines[first].power_off()
    second = job.leader(2)
    job.until_steps(job.steps_done() + 20)
    job.machines[first].power_on()
    job.start_member(first)
    job.controllers[first] = job.start_controller(first)
    for number in {*range(CONTROLLERS)} - {second}:
        job.set_wall_clock(number, -HOUR_S)
    job.until_steps(job.steps_done() + 20)
    job.kill_rank(1, job.status(second))
    job.machines[second].cut()
    third = job.leader(3)
    job.until_steps(job.steps_done() + 20)
    job.machines[second].heal()
    job.until_over()

    report = job.report(third)
    assert [incident["rung"] for incident in report["incidents"]] == ["recover_in_place"] * 3
    began_s = report["incidents"][0]["began_s"]
    for incident, rank in zip(report["incidents"], (1, 0, 1), strict=True):
        assert_nobody_harmed(incident, {rank}, ranks=RANKS)
        assert 0 <= incident["began_s"] - began_s < HOUR_S / 2, "the job's clock has jumped with a controller's"
        assert 0 <= incident["recovery_s"] < PATIENCE_S, report
    undisturbed = run_undisturbed(tmp_path / "undisturbed", ranks=RANKS, steps=MANY_STEPS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


@pytest.mark.parametrize("outage_s", [OUTAGE_S, pytest.param(LONG_OUTAGE_S, marks=pytest.mark.nightly)])
def test_etcd_is_gone_for_longer_than_a_lease_and_nothing_changes(
    start_machines: StartMachines, tmp_path: Path, undisturbed: Record, outage_s: float
) -> None:
    """Training continues, the leader keeps its term, and what happens meanwhile is recovered when etcd is back."""
    require_etcd()
    job = EtcdJob(start_machines(5), tmp_path, steps=STEPS, policy=POLICY)
    first = job.leader(1)
    job.until_steps(20)
    before = job.status(first)
    job.end_members()
    ended_s = time.monotonic()
    job.until_steps(job.steps_done() + 10)
    job.kill_rank(1, before)
    time.sleep(max(0.0, ended_s + outage_s - time.monotonic()))
    assert "cannot keep a lease" in job.said(), "etcd was there all the time"
    for number in range(CONTROLLERS):
        job.start_member(number)
    job.until_steps(job.steps_done() + 30)
    assert [job.controllers[number].poll() for number in range(CONTROLLERS)] == [None] * CONTROLLERS, job.said()
    after = job.status(first)
    assert (after["live"], after["term"]) == (True, 1), job.said()
    job.until_over()

    report = job.report(first)
    assert [incident["rung"] for incident in report["incidents"]] == ["recover_in_place"]
    assert_nobody_harmed(report["incidents"][0], {1}, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
