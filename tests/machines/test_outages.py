"""What passes: short cuts of cables, a bad network. Nobody is replaced for it."""

import time

import msgspec
import pytest

from ..chaos.comparing import assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartJob
from .job import Job
from .network import Quality

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

SILENT_S, LOSSY_SILENT_S = 10.0, 40.0
STEPS_MEANWHILE = 20
SHORT, LONGER, BAD = 30, 70, 200  # steps before which each begins
MINUTE_S, DEAF_S = 60.0, 1.5  # deaf for half of the silence that is allowed by default
CONTROLLER = 0


def test_an_outage_that_passes_replaces_nobody(start_job: StartJob, undisturbed: Record) -> None:
    """A cable that is out for 1 s and for 5 s, and then 5 % loss at 50 ms."""
    policy = {"heartbeat": {"missed": round(SILENT_S / 0.5)}}
    job = start_job(4, step_s=0.05, policy=policy, gates=(SHORT, LONGER, BAD, STEPS - 1))
    pids = {rank.rank: rank.pid for rank in job.held_at(SHORT).ranks}
    for step, cut_s in ((SHORT, 1.0), (LONGER, 5.0)):
        job.held_at(step)
        machine = job.machine_of(1)
        job.open_gate(step)
        job.until_steps(step + 5)
        machine.cut()
        time.sleep(cut_s)
        machine.heal()

    job.held_at(BAD)
    for number in range(len(job.machines)):
        # 50 ms from any machine to any other
        job.machines.network.worsen(number, Quality(delay_s=0.025, loss=0.05, seed=number))
    job.open_gate(BAD)
    job.until_steps(BAD + STEPS_MEANWHILE)
    for number in range(len(job.machines)):
        job.machines.network.clear(number)

    assert_undisturbed(job, pids, undisturbed)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "quality", [Quality(loss=0.2, seed=5), Quality(rate_bits=10e6)], ids=["20 % loss", "10 Mbit/s"]
)
def test_a_minute_of_a_bad_network_replaces_nobody(start_job: StartJob, undisturbed: Record, quality: Quality) -> None:
    """On every cable, with as much silence, and as long steps, allowed as TCP makes of such a loss."""
    policy = {"heartbeat": {"missed": round(LOSSY_SILENT_S / 0.5)}, "stall": {"grace_s": LOSSY_SILENT_S}}
    job = start_job(4, step_s=0.02, policy=policy, gates=(SHORT, STEPS - 1))
    pids = {rank.rank: rank.pid for rank in job.held_at(SHORT).ranks}
    for number in range(len(job.machines)):
        job.machines.network.worsen(number, msgspec.structs.replace(quality, seed=number))
    job.open_gate(SHORT)
    time.sleep(MINUTE_S)
    for number in range(len(job.machines)):
        job.machines.network.clear(number)
    assert_undisturbed(job, pids, undisturbed)


@pytest.mark.nightly
def test_a_moment_of_deafness_in_one_direction_replaces_nobody(start_job: StartJob, undisturbed: Record) -> None:
    """A machine that does not hear the controller, and then a controller that does not hear a machine."""
    job = start_job(4, step_s=0.05, gates=(SHORT, LONGER, STEPS - 1))
    pids = {rank.rank: rank.pid for rank in job.held_at(SHORT).ranks}
    for step, controller_is_deaf in ((SHORT, False), (LONGER, True)):
        job.held_at(step)
        machine = job.machine_of(1).number
        deaf, unheard = (CONTROLLER, machine) if controller_is_deaf else (machine, CONTROLLER)
        job.open_gate(step)
        job.machines.network.deafen(deaf, unheard)
        time.sleep(DEAF_S)
        job.machines.network.undeafen(deaf, unheard)
    assert_undisturbed(job, pids, undisturbed)


def assert_undisturbed(job: Job, pids: dict[int, int], undisturbed: Record) -> None:
    """The job ends with the processes that it had, and with the bits of the undisturbed run."""
    status = job.held_at(STEPS - 1)
    assert {rank.rank: rank.pid for rank in status.ranks} == pids, status.incidents
    job.open_gate(STEPS - 1)
    report = job.finish()
    assert [incident["replaced"] for incident in report["incidents"] if incident["replaced"]] == []
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
