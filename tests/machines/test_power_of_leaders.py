"""The machine of the controller that leads loses its power, in each phase of a step and of a recovery. No bit changes.

A rank stops itself (SIGSTOP) at an injection point, which holds everybody in that phase until the power is gone, or
until the next controller leads: then it finds the job in that phase.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.compat import StrEnum
from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from ..etcd.server import require_etcd
from .conftest import RANKS, STEPS, StartMachines
from .etcd_job import CONTROLLERS
from .gated_etcd_job import GatedEtcdJob
from .job import PATIENCE_S
from .test_power import IN_A_RECOVERY, IN_A_STEP, OF_A_NEWCOMER, assert_healthy_kept

pytestmark = [pytest.mark.machines, pytest.mark.timeout(1800)]

FIRST, EVERY = 8, 12
HEALTHY_RANK, KILLED_RANK = 0, 1
# A rank that is stopped is at fault after a while, a gate looks like a stall, and computers are slow. One rank is hit
# more often than the default budgets bear.
POLICY: dict[str, Any] = {
    "ladder": [{"rung": "recover_in_place", "attempts": 8, "budget": {"per_job": 100}}, {"rung": "stop"}],
    "checkpoint": {"every_steps": 50},
    "stall": {"grace_s": PATIENCE_S, "suspended_s": PATIENCE_S},
    "deadlines": {"start_s": PATIENCE_S, "rejoin_s": PATIENCE_S, "quiesce_s": PATIENCE_S, "orders_s": 6 * PATIENCE_S},
}
A_FEW = (InjectionPoint.UPDATE, InjectionPoint.REBUILD)


class Held(StrEnum):
    """For how long the rank that is stopped holds the others in the phase."""

    UNTIL_THE_POWER_IS_OFF = "until the power is off"
    UNTIL_ANOTHER_LEADS = "until another leads"


def test_leaders_that_lose_their_power_in_a_phase_change_no_bit(
    start_machines: StartMachines, tmp_path: Path, undisturbed: Record
) -> None:
    """Two of the cases of the night: in the update of a step, and while a recovery builds the communicators again."""
    job = started(start_machines, tmp_path, A_FEW)
    power_off_in_turn(job, A_FEW, Held.UNTIL_ANOTHER_LEADS)
    assert_nothing_lost(job, A_FEW, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("held", Held)
@pytest.mark.parametrize("points", [IN_A_STEP, IN_A_RECOVERY], ids=["step", "recovery"])
def test_the_leaders_machine_loses_its_power_in_each_phase(
    start_machines: StartMachines,
    tmp_path: Path,
    undisturbed: Record,
    points: Sequence[InjectionPoint],
    held: Held,
) -> None:
    """Of a step: nobody notices. Of the recovery from the death of a rank: nobody else gets a new process."""
    job = started(start_machines, tmp_path, points)
    power_off_in_turn(job, points, held)
    assert_nothing_lost(job, points, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("held", Held)
def test_the_leaders_machine_loses_its_power_while_a_newcomer_gets_in(
    start_machines: StartMachines, tmp_path: Path, undisturbed: Record, held: Held
) -> None:
    """While it joins, is repaired, or rolls back: the next leader lets the same process in."""
    faults = [
        ArmedFault(KILLED_RANK, FaultAction.STOP, point, None, incarnation=number)
        for number, point in enumerate(OF_A_NEWCOMER, start=2)
    ]
    job = started(start_machines, tmp_path, OF_A_NEWCOMER, faults=faults)
    power_off_in_turn(job, OF_A_NEWCOMER, held, stopped=KILLED_RANK)
    assert_nothing_lost(job, IN_A_RECOVERY[: len(OF_A_NEWCOMER)], undisturbed)


def started(
    start_machines: StartMachines, root: Path, points: Sequence[InjectionPoint], *, faults: Sequence[ArmedFault] = ()
) -> GatedEtcdJob:
    """Start a job with a gate in front of each case, and one behind the last."""
    require_etcd()
    machines = start_machines(CONTROLLERS + RANKS)
    return GatedEtcdJob(machines, root, gates=gates(len(points)), steps=STEPS, policy=POLICY, faults=faults)


def power_off_in_turn(
    job: GatedEtcdJob, points: Sequence[InjectionPoint], held: Held, *, stopped: int = HEALTHY_RANK
) -> None:
    """Have leader after leader lose its machine, each in a phase in which a rank holds the others."""
    steps = gates(len(points))
    for term, (point, gate, after) in enumerate(zip(points, steps, steps[1:], strict=False), start=1):
        leader = job.leader(term)
        job.until_all_controllers()
        before = job.held_at(gate)
        holds = job.machine_of(stopped, before)
        kills = point in IN_A_RECOVERY or stopped == KILLED_RANK
        if stopped == HEALTHY_RANK:
            job.inject(ArmedFault(stopped, FaultAction.STOP, point))
        if kills:
            job.inject(ArmedFault(KILLED_RANK, FaultAction.KILL, InjectionPoint.FORWARD))
        job.open_gate(gate)
        pid = job.until_stopped(holds)
        job.machines[leader].power_off()
        if held is Held.UNTIL_ANOTHER_LEADS:
            job.leader(term + 1)
        os.kill(pid, signal.SIGCONT)
        now = job.held_at(after)
        assert now.term == term + 1, job.said()
        assert_healthy_kept(before, now, {KILLED_RANK} if kills else set())
        assert_committed(now, after)
        job.boot(leader)


def assert_committed(status: JobStatus, step: int) -> None:
    """The controller knows of all steps before the gate."""
    assert status.committed == step, status


def assert_nothing_lost(job: GatedEtcdJob, points: Sequence[InjectionPoint], undisturbed: Record) -> None:
    """The job ends; each death of a rank was one incident, in which nothing was lost; and all bits are the same."""
    last = job.leader(len(points) + 1)
    job.open_gate(gates(len(points))[-1])
    job.until_over()
    report = job.report(last)
    incidents = [incident for incident in report["incidents"] if incident["outcome"] != "dismissed"]
    assert [incident["rung"] for incident in incidents] == ["recover_in_place"] * sum(
        point in IN_A_RECOVERY for point in points
    ), report["incidents"]
    for incident in incidents:
        assert_nobody_harmed(incident, {KILLED_RANK}, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def gates(cases: int) -> tuple[int, ...]:
    """Return the steps in front of which all are held."""
    return tuple(FIRST + EVERY * number for number in range(cases + 1))
