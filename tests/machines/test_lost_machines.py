"""What is lost for good, or for long: a process, a cable, the power of a machine. The bits stay the same."""

import pytest

from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import FaultKind

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartJob
from .job import PATIENCE_S

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

KILLED, CUT, BACK, OFF, END = 40, 80, 120, 160, STEPS - 1


def test_a_killed_rank_a_cut_cable_and_a_power_cut_change_no_bit(start_job: StartJob, undisturbed: Record) -> None:
    """Each replaces the one rank that was hit, on the spare where its machine is gone; the other keeps its process.

    A machine that is heard again is freed of its old processes, and is the spare for the next loss.
    """
    gates = (KILLED, CUT, BACK, OFF, END)
    job = start_job(4, step_s=0.01, gates=gates, policy={"stall": {"grace_s": PATIENCE_S}})  # a gate is no stall
    job.held_at(KILLED)
    job.open_gate(KILLED)
    job.kill_rank(1)

    cut_off = job.held_at(CUT).ranks[1].node
    machine = job.machine_of(1)
    job.open_gate(CUT)
    machine.cut()
    assert job.held_at(BACK).ranks[1].node != cut_off
    machine.heal()

    def is_spare(status: JobStatus) -> bool:
        return any((node.node, node.state) == (cut_off, "spare") for node in status.nodes)

    job.until(is_spare, "the machine whose cable is mended to be a spare")
    job.until(lambda _: "midstep-r" not in machine.run("ps", "-A", "-o", "comm="), "the end of its old processes")
    job.open_gate(BACK)

    without_power = job.held_at(OFF).ranks[0].node
    machine = job.machine_of(0)
    job.open_gate(OFF)
    machine.power_off()
    assert {rank.node for rank in job.held_at(END).ranks}.isdisjoint({without_power})
    job.open_gate(END)

    report = job.finish()
    assert [incident["rung"] for incident in report["incidents"]] == ["recover_in_place", "recover", "recover"]
    for incident, rank in zip(report["incidents"], (1, 1, 0), strict=True):
        assert_nobody_harmed(incident, {rank}, ranks=RANKS)
    causes = [incident["cause"].split(":")[0] for incident in report["incidents"]]
    assert causes == [FaultKind.EXIT, FaultKind.NODE_LOST, FaultKind.NODE_LOST]
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
