"""What is lost of a job on Ray: a process, an actor, a raylet, a machine, the controller. The bits stay the same."""

import time

from midstep.protocol.types import FaultKind

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers, assert_same_steps
from ..chaos.jobs import Record
from ..machines.job import PATIENCE_S
from .conftest import RANKS, STEPS, StartJob

READY_S = 2.0
SLOW_S = 0.2  # training is not over before Ray has started the actor again
KILLED, ACTOR, RAYLET, OFF, END = 20, 40, 60, 80, STEPS - 1


def test_a_killed_rank_actor_raylet_and_machine_change_no_bit(start_job: StartJob, undisturbed: Record) -> None:
    """Each replaces the one rank that was hit, on a spare where its node is gone; the other keeps its process.

    Every spare that was used is asked for again. At the end nothing is left in Ray. A gate is opened when the loss has
    been noticed: the other rank would else get to the next one meanwhile, and a rank at a gate follows no order.
    """
    job = start_job(gates=(KILLED, ACTOR, RAYLET, OFF, END))
    job.held_at(KILLED)
    job.kill_rank(1)
    job.until_incidents(1)
    job.open_gate(KILLED)

    node = job.held_at(ACTOR).ranks[1].node
    job.until_there_is_a_spare()
    job.kill_actor_of(node)
    job.until_incidents(2)
    job.open_gate(ACTOR)

    node = job.held_at(RAYLET).ranks[0].node
    job.until_there_is_a_spare()
    job.kill_raylet_of(node)
    job.until_incidents(3)
    job.cluster.mend()  # the controller may have moved from there to the machine that is off next, and needs a place
    job.open_gate(RAYLET)

    node = job.held_at(OFF).ranks[1].node
    job.until_there_is_a_spare()
    job.machine_named(node).power_off()
    job.until_incidents(4)
    job.open_gate(OFF)

    job.held_at(END)
    job.open_gate(END)
    report = job.finish()
    assert [incident["rung"] for incident in report["incidents"]] == ["recover_in_place", *["recover"] * 3]
    for incident, rank in zip(report["incidents"], (1, 1, 0, 1), strict=True):
        assert_nobody_harmed(incident, {rank}, ranks=RANKS)
    causes = [incident["cause"].split(":")[0] for incident in report["incidents"]]
    assert causes == [FaultKind.EXIT, *[FaultKind.NODE_LOST] * 3]
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    job.assert_nothing_left()


def test_ray_starts_the_controller_again_and_training_goes_on(start_job: StartJob, undisturbed: Record) -> None:
    """Its actor's process is killed, then its machine is off: the agents find it at the next address, nobody restarts.

    What was spent of a budget stays spent.
    """
    job = start_job(gates=(KILLED, ACTOR, RAYLET, OFF, END))
    job.held_at(KILLED)
    job.kill_rank(0)
    job.until_incidents(1)
    job.open_gate(KILLED)

    pids = [rank.pid for rank in job.held_at(ACTOR).ranks]
    job.kill_controller_actor()
    job.open_gate(ACTOR)
    status = job.held_at(RAYLET)
    assert ([rank.pid for rank in status.ranks], status.term) == (pids, 2)

    before = job.machine_of_controller()
    there = {node.node for node in status.nodes if node.failure_domain == before.name}
    elsewhere = [rank.rank for rank in status.ranks if rank.node not in there]
    before.power_off()
    job.open_gate(RAYLET)
    status = job.held_at(OFF)
    assert job.machine_of_controller() is not before
    assert status.term == 3
    assert [status.ranks[rank].pid for rank in elsewhere] == [pids[rank] for rank in elsewhere]

    job.kill_rank(1)
    job.until_incidents(len(status.incidents) + 1)
    job.open_gate(OFF)
    job.held_at(END)
    job.open_gate(END)
    report = job.finish()
    assert report["incidents"][0]["rung"] == "recover_in_place"
    assert report["incidents"][-1]["rung"] == "recover_in_place"
    in_place = [incident for incident in report["incidents"] if incident["rung"] == "recover_in_place"]
    spent = {budget["name"]: budget["used"] for budget in report["budgets"]}
    assert spent["recover_in_place per job"] == len(in_place), report["budgets"]
    assert all(incident["steps_lost"] == 0 for incident in report["incidents"])
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    job.assert_nothing_left()


def test_a_stop_is_kept_while_ray_starts_the_controller_again(start_job: StartJob, undisturbed: Record) -> None:
    """The next controller carries it out, with a checkpoint of the step that all ranks have made."""
    job = start_job(gates=(KILLED,), step_s=SLOW_S)
    job.held_at(KILLED)
    job.kill_controller_actor()
    job.end_driver()
    job.open_gate(KILLED)
    assert job.controller.wait(PATIENCE_S) == 130, job.said()
    report = job.report()
    assert (report["exit_code"], report["incidents"]) == (130, [])
    (steps,) = {len(steps) for steps in job.record().steps.values()}
    assert (job.directory / "checkpoints" / f"step-{steps:08}").is_dir()
    assert_same_steps(job.record(), undisturbed)
    job.assert_nothing_left()


def test_a_job_whose_driver_was_killed_continues_and_resume_follows_it(
    start_job: StartJob, undisturbed: Record
) -> None:
    """It finds the actor by its name: the job is in the term that it was in, and has the processes that it had."""
    job = start_job(gates=(KILLED, END))
    job.held_at(KILLED)
    job.end_driver("KILL")
    job.controller.wait(PATIENCE_S)
    job.resume()
    job.until_said(f"midstep: job {job.name} in ")
    job.open_gate(KILLED)
    assert job.held_at(END).term == 1
    job.open_gate(END)
    assert job.finish()["incidents"] == []
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    job.assert_nothing_left()


def test_ranks_leave_a_machine_that_ray_drains_between_two_steps(start_job: StartJob, undisturbed: Record) -> None:
    """As it does for a preemption: the rank moves to the spare before the deadline, and no step is repeated."""
    gates = range(KILLED, END, 5)  # the move waits for a process that is ready, and then for the end of a step
    job = start_job(gates=gates)
    job.held_at(KILLED)
    job.until_there_is_a_spare()
    machine = job.machine_of(1)
    job.cluster.drain(machine)
    for gate in gates:
        job.until_steps(gate)  # the job may be about to pause: it is held in front of the boundary then
        if job.machine_of(1) is machine:
            time.sleep(READY_S)
        job.open_gate(gate)
    assert job.machine_of(1) is not machine
    report = job.finish()
    assert [incident["steps_lost"] for incident in report["incidents"]] == [0] * len(report["incidents"])
    assert all(len(steps) == 1 for ranks in job.record().steps.values() for steps in ranks.values())
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
    job.assert_nothing_left()
    machine.power_off()  # Ray takes no drained raylet back
