"""What passes: short cuts of cables, a bad network. Nobody is replaced for it."""

import time

import pytest

from ..chaos.comparing import assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartJob
from .network import Quality

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

SILENT_S = 10.0
STEPS_MEANWHILE = 20
SHORT, LONGER, BAD = 30, 70, 200  # steps before which each begins


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

    ranks = job.held_at(STEPS - 1).ranks
    assert {rank.rank: rank.pid for rank in ranks} == pids
    job.open_gate(STEPS - 1)
    report = job.finish()
    assert [incident["replaced"] for incident in report["incidents"] if incident["replaced"]] == []
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
