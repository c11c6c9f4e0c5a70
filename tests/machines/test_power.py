"""Each machine loses its power, in each phase of a step and of a recovery. Training goes on, and no bit changes.

A rank stops itself (SIGSTOP) at an injection point, which holds everybody in that phase until the power is gone.
"""

import os
import signal
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from midstep.protocol.compat import StrEnum
from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..chaos.comparing import assert_same_numbers
from ..chaos.jobs import Record
from .conftest import StartJob, run_undisturbed
from .job import PATIENCE_S, Job
from .machines import Machine

pytestmark = [pytest.mark.machines, pytest.mark.timeout(1800)]

RANKS, STEPS, FIRST, EVERY = 3, 60, 8, 12
MOST_CASES = 4
SHAPE: dict[str, Any] = {"nodes": RANKS, "steps": STEPS, "step_s": 0.01}
IN_A_STEP = (
    InjectionPoint.FORWARD,
    InjectionPoint.BACKWARD,
    InjectionPoint.COLLECTIVE,
    InjectionPoint.BARRIER,
    InjectionPoint.UPDATE,
)
IN_A_RECOVERY = (
    InjectionPoint.STOP,
    InjectionPoint.CLEAN,
    InjectionPoint.REBUILD,
    InjectionPoint.REPAIR,
    InjectionPoint.ROLLBACK,
)
OF_A_NEWCOMER = (InjectionPoint.JOIN, InjectionPoint.REPAIR, InjectionPoint.ROLLBACK)
KILLED_RANK = 1  # whose death is the reason for a recovery
# A rank that is stopped is at fault after a while, a gate looks like a stall, and computers are slow. One rank is hit
# more often than the default budgets bear.
POLICY = {
    "ladder": [
        {"rung": "retry_step", "attempts": 8, "budget": {"per_job": 100}},
        {"rung": "recover_in_place", "attempts": 8, "budget": {"per_job": 100}},
        {"rung": "recover", "attempts": 8, "budget": {"per_job": 100}},
        {"rung": "stop"},
    ],
    "stall": {"grace_s": PATIENCE_S, "suspended_s": PATIENCE_S},
    "deadlines": {"start_s": PATIENCE_S, "rejoin_s": PATIENCE_S, "quiesce_s": PATIENCE_S, "orders_s": 6 * PATIENCE_S},
}


class Role(StrEnum):
    """What the machine does that is powered off."""

    FIRST = "first"  # it has rank 0 and the store of the generation
    PLAIN = "plain"
    KILLED = "killed"  # the rank whose death is the reason for the recovery is started again on it
    SPARE = "spare"


class Case(msgspec.Struct, frozen=True):
    """A machine, and the phase in which it is powered off."""

    point: InjectionPoint
    role: Role

    @property
    def lost(self) -> int | None:
        """The rank that is on the machine."""
        return {Role.FIRST: 0, Role.PLAIN: 2, Role.KILLED: KILLED_RANK, Role.SPARE: None}[self.role]

    @property
    def stopped(self) -> int:
        """The rank that holds the phase: it is on the machine, unless that has none that comes to the point."""
        return 0 if self.role in {Role.SPARE, Role.KILLED} else self.lost or 0

    @property
    def replaced(self) -> set[int]:
        """The ranks that get new processes."""
        killed = {KILLED_RANK} if self.point in IN_A_RECOVERY else set()
        return killed | ({self.lost} if self.lost is not None else set())


A_FEW = (
    Case(InjectionPoint.COLLECTIVE, Role.SPARE),
    Case(InjectionPoint.BARRIER, Role.FIRST),
    Case(InjectionPoint.REBUILD, Role.PLAIN),
    Case(InjectionPoint.ROLLBACK, Role.KILLED),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of the same training on this computer, to which nothing happens."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed") / "it", ranks=RANKS, steps=STEPS)


def test_machines_that_lose_their_power_in_a_phase_change_no_bit(start_job: StartJob, undisturbed: Record) -> None:
    """Four of the cases of the night: the spare, the machine with rank 0, and two in the recovery from another loss."""
    power_off_in_turn(start_job, A_FEW, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("point", IN_A_STEP)
def test_each_machine_loses_its_power_in_a_phase_of_a_step(
    start_job: StartJob, undisturbed: Record, point: InjectionPoint
) -> None:
    """The rank that was on it starts on the spare; without a rank on it, nobody notices."""
    power_off_in_turn(start_job, [Case(point, role) for role in Role if role != Role.KILLED], undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("point", IN_A_RECOVERY)
def test_each_machine_loses_its_power_in_a_phase_of_a_recovery(
    start_job: StartJob, undisturbed: Record, point: InjectionPoint
) -> None:
    """The rank that had been killed, and the one that is on the machine, get new processes, and nobody else."""
    power_off_in_turn(start_job, [Case(point, role) for role in Role], undisturbed)


@pytest.mark.nightly
def test_the_machine_that_takes_over_loses_its_power_too(start_job: StartJob, undisturbed: Record) -> None:
    """While the newcomer on it joins, is repaired, or rolls back: the next spare takes over."""
    gates = tuple(range(FIRST, STEPS, EVERY))[: len(OF_A_NEWCOMER) + 1]
    faults = [
        ArmedFault(rank, FaultAction.STOP, point, None, incarnation=2) for rank, point in enumerate(OF_A_NEWCOMER)
    ]
    job = start_job(RANKS + 3, **SHAPE, gates=gates, faults=tuple(faults), policy=POLICY)
    for rank, (gate, after) in enumerate(pairwise(gates)):
        job.until(both_spares_wait, "the machines that were powered on again")
        before = job.held_at(gate)
        first = job.machine_of(rank)
        first.power_off()
        job.open_gate(gate)
        second = until_one_is_stopped(job, before, first)
        second.power_off()
        assert_healthy_kept(before, job.held_at(after), {rank})
        for machine in (first, second):
            job.power_on(machine)
    assert_nothing_lost(job, gates[-1], undisturbed, len(gates) - 1)


def power_off_in_turn(start_job: StartJob, cases: Iterable[Case], undisturbed: Record) -> None:
    """Run a job in which machine after machine is powered off, and on again as a spare."""
    cases = list(cases)
    assert len(cases) <= MOST_CASES
    gates = tuple(range(FIRST, STEPS, EVERY))[: len(cases) + 1]
    job = start_job(RANKS + 2, **SHAPE, gates=gates, policy=POLICY)
    for case, gate, after in zip(cases, gates, gates[1:], strict=False):
        before = job.held_at(gate)
        spare = job.spare()
        machine = spare if case.lost is None else job.machine_of(case.lost)
        holds = job.machine_of(case.stopped)
        in_a_recovery = case.point in IN_A_RECOVERY
        job.inject(ArmedFault(case.stopped, FaultAction.STOP, case.point))
        if in_a_recovery:
            job.inject(ArmedFault(KILLED_RANK, FaultAction.KILL, InjectionPoint.FORWARD))
        job.open_gate(gate)
        stopped = job.until_stopped(holds)
        machine.power_off()
        if machine is not holds:
            os.kill(stopped, signal.SIGCONT)
        assert_healthy_kept(before, job.held_at(after), case.replaced)
        job.power_on(machine)
    assert_nothing_lost(job, gates[-1], undisturbed, sum(bool(case.replaced) for case in cases))


def both_spares_wait(status: JobStatus) -> bool:
    """Whether the two machines that have no rank have joined."""
    return sum(node.state == "spare" for node in status.nodes) == 2


def until_one_is_stopped(job: Job, before: JobStatus, without_power: Machine) -> Machine:
    """Wait until a newcomer has stopped itself on a machine that was a spare, and return that machine."""
    spares = {node.node for node in before.nodes if node.state == "spare"} - {without_power.name}

    def stopped(status: JobStatus) -> bool:
        return any(rank.node in spares for rank in status.ranks)

    status = job.until(stopped, "a newcomer on a spare")
    machine = job.machine_named(next(rank.node for rank in status.ranks if rank.node in spares))
    job.until_stopped(machine)
    return machine


def assert_healthy_kept(before: JobStatus, after: JobStatus, replaced: set[int]) -> None:
    """Just these ranks have new processes; all others have those that they had, where they were."""
    holders = [{rank.rank: (rank.node, rank.pid) for rank in status.ranks} for status in (before, after)]
    assert {rank for rank in holders[0] if holders[0][rank] != holders[1][rank]} == replaced


def assert_nothing_lost(job: Job, gate: int, undisturbed: Record, incidents: int) -> None:
    """The job ends, each incident ended with all steps kept, and all bits are those of the undisturbed run."""
    job.held_at(gate)
    job.open_gate(gate)
    resumed = [each for each in job.finish()["incidents"] if each["outcome"] != "dismissed"]
    assert len(resumed) >= incidents
    for incident in resumed:
        assert (incident["outcome"], incident["steps_lost"], incident["restore"]) == ("resumed", 0, "replica"), incident
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
