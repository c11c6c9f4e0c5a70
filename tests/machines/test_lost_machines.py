"""What is lost for good, or for long: a process, a cable, the power of a machine. The bits stay the same."""

import time

import msgspec
import pytest

from midstep.agent.last_words import EVERY_S
from midstep.protocol.exits import RESTART_HERE
from midstep.protocol.types import FaultKind

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartJob
from .job import PATIENCE_S, Job
from .network import BAD
from .test_operators import made, typed

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

KILLED, CUT, BACK, OFF, END = 40, 80, 120, 160, STEPS - 1
STEPS_MEANWHILE = 20
LAST_WORDS = "the fan is loud"
CONTROLLER_CUT_S = CONTROLLER_GONE_S = 20.0
LEAVE_S = 8.0


@pytest.mark.parametrize(
    "bad_network", [False, pytest.param(True, marks=(pytest.mark.nightly, pytest.mark.timeout(1200)))]
)
def test_a_killed_rank_a_cut_cable_and_a_power_cut_change_no_bit(
    start_job: StartJob, undisturbed: Record, bad_network: bool
) -> None:
    """Each replaces the one rank that was hit, on the spare where its machine is gone; the other keeps its process.

    What was printed last on the one without power is in the report. A machine that is heard again is freed of its old
    processes, and is the spare for the next loss. So it is with 50 ms from each machine to any other and 2 % of all
    frames lost.
    """
    gates = (KILLED, CUT, BACK, OFF, END)
    job = start_job(4, step_s=0.01, gates=gates, policy={"stall": {"grace_s": PATIENCE_S}})  # a gate is no stall
    job.held_at(KILLED)
    if bad_network:
        worsen_all_cables(job)
    job.open_gate(KILLED)
    job.kill_rank(1)

    cut_off = job.held_at(CUT).ranks[1].node
    machine = job.machine_of(1)
    job.open_gate(CUT)
    machine.cut()
    assert job.held_at(BACK).ranks[1].node != cut_off
    machine.heal()
    job.until_spare(cut_off)
    job.until_without_ranks(machine)
    job.open_gate(BACK)

    viewer = made(job, "viewer")
    first = job.held_at(OFF).ranks[0]
    machine = job.machine_of(0)
    machine.run("sh", "-c", f"echo {LAST_WORDS} > /proc/{first.pid}/fd/1")
    time.sleep(3 * EVERY_S)
    job.open_gate(OFF)
    machine.power_off()
    assert {rank.node for rank in job.held_at(END).ranks}.isdisjoint({first.node})
    reported = typed(job.machine_of(0), viewer, "report")
    assert f"| [rank 0] {LAST_WORDS}" in reported, reported
    job.open_gate(END)

    report = job.finish()
    if bad_network:  # steps that take too long are repeated now and then, at nobody's cost
        incidents = [incident for incident in report["incidents"] if incident["replaced"]]
        report["incidents"] = incidents
    assert [incident["rung"] for incident in report["incidents"]] == ["recover_in_place", "recover", "recover"]
    for incident, rank in zip(report["incidents"], (1, 1, 0), strict=True):
        assert_nobody_harmed(incident, {rank}, ranks=RANKS)
    causes = [incident["cause"].split(":")[0] for incident in report["incidents"]]
    assert causes == [FaultKind.EXIT, FaultKind.NODE_LOST, FaultKind.NODE_LOST]
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def test_a_controller_whose_own_cable_was_out_gives_nobody_up(start_job: StartJob, undisturbed: Record) -> None:
    """For longer than any node may be silent. All are heard again in time after it, and the same processes go on."""
    job = start_job(3, step_s=0.02, gates=(KILLED, END), policy={"stall": {"grace_s": PATIENCE_S}})
    pids = {rank.rank: rank.pid for rank in job.held_at(KILLED).ranks}
    controller = job.machines[0]
    job.open_gate(KILLED)
    controller.cut()
    job.until_steps(KILLED + STEPS_MEANWHILE)
    time.sleep(CONTROLLER_CUT_S)
    held = job.status()
    assert held is not None
    assert held.holding
    controller.heal()
    job.until(lambda status: not status.holding, "the end of the hold")
    ranks = job.held_at(END).ranks
    assert {rank.rank: rank.pid for rank in ranks} == pids
    job.open_gate(END)
    assert job.finish()["incidents"] == []
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def test_the_only_controller_is_gone_for_a_while_and_training_continues(
    start_job: StartJob, undisturbed: Record
) -> None:
    """A rank that dies meanwhile is replaced when a controller is back, and the other one keeps its process."""
    job = start_job(3, step_s=0.02, gates=(KILLED, CUT, END), policy={"stall": {"grace_s": PATIENCE_S}})
    pids = {rank.rank: rank.pid for rank in job.held_at(KILLED).ranks}
    machine = job.machine_of(1)
    job.end_controller()
    job.open_gate(KILLED)
    job.until_steps(CUT)
    machine.run("kill", "-9", str(pids[1]))
    job.open_gate(CUT)
    time.sleep(CONTROLLER_GONE_S)
    assert job.steps_done() == CUT, "nobody has replaced rank 1"
    job.controller = job.start_controller()
    status = job.held_at(END)
    assert (status.term, status.ranks[0].pid) == (2, pids[0])
    job.open_gate(END)
    (incident,) = job.finish()["incidents"]
    assert incident["rung"] == "recover_in_place"
    assert_nobody_harmed(incident, {1}, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def test_a_world_that_is_cut_off_as_a_whole_ends_by_itself(start_job: StartJob, undisturbed: Record) -> None:
    """It trains on beside its successor until `agent.leave_s`; its agent says with its exit code that it may come back.

    What it did meanwhile has the same bits, and none of it became a checkpoint of the job.
    """
    policy = {"stall": {"grace_s": PATIENCE_S}, "agent": {"leave_s": LEAVE_S}}
    job = start_job(3, nodes=1, ranks_per_node=RANKS, step_s=0.02, gates=(KILLED, END), policy=policy)
    cut_off = job.held_at(KILLED).ranks[0].node
    machine = job.machine_of(0)
    machine.cut()
    job.open_gate(KILLED)
    status = job.held_at(END)
    assert all(rank.node != cut_off for rank in status.ranks)
    assert job.agents[machine.number].wait(PATIENCE_S) == RESTART_HERE
    job.until_without_ranks(machine)
    machine.heal()
    job.start_agent(machine.number)
    job.until(lambda status: any(node.state == "spare" for node in status.nodes), "the machine to be a spare")
    job.open_gate(END)
    (incident,) = job.finish()["incidents"]
    assert incident["cause"].startswith(FaultKind.NODE_LOST)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def worsen_all_cables(job: Job) -> None:
    """From now on frames take their time from any machine to any other, and some of them are lost."""
    for machine in job.machines:
        job.machines.network.worsen(machine.number, msgspec.structs.replace(BAD, seed=machine.number))
