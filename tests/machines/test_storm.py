"""Random faults in one job of four machines with two ranks each, two spares, and a machine for the controller.

What holds is said by `draw`: at most two machines are away at once, so two copies of everything are alive, and no step
may be lost. MIDSTEP_STORM_SEED draws other faults, MIDSTEP_STORM_FAULTS more of them.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.incidents import JobStatus

from ..chaos.comparing import assert_same_steps
from .conftest import StartJob, run_undisturbed
from .job import PATIENCE_S, Job
from .machines import cables_are_bad
from .random_faults import Fault, Round, draw

pytestmark = [pytest.mark.machines, pytest.mark.timeout(1800)]

MACHINES, RANKS_PER_NODE, SPARES = 4, 2, 2
RANKS = MACHINES * RANKS_PER_NODE
STEP_S, WITHOUT_END = 0.2, 1_000_000
MEANWHILE = 3  # steps after a round, without a fault
A_FEW, MANY = 6, 100
SEED = 7
LIMIT_S = 7200
MORE_THAN_ENOUGH = 10_000
POLICY: dict[str, Any] = {
    "ladder": [
        {"rung": rung, "attempts": attempts, "budget": {"per_job": MORE_THAN_ENOUGH}}
        for rung, attempts in (("retry_step", 3), ("recover_in_place", 3), ("recover", 8), ("reschedule_pod", 2))
    ]
    + [{"rung": "stop"}],
    "incident": {"max_attempts": 30},
    "node": {"failures": None},
    "stall": {"grace_s": 60.0, "suspended_s": 3.0},  # a busy computer is no stall
    "deadlines": {"start_s": PATIENCE_S, "rejoin_s": PATIENCE_S, "quiesce_s": PATIENCE_S, "orders_s": 6 * PATIENCE_S},
    "checkpoint": {"every_steps": 1000},  # what is kept is kept by copies alone
    # Bad cables lose some of the connections that eight ranks make; TCP tries those again after 1 s, and after 3 s.
    **({"communicator": {"link_up_s": 10.0}} if cables_are_bad() else {}),
}


def test_a_few_random_faults_change_no_bit(start_job: StartJob, tmp_path: Path) -> None:
    """Six faults, of six kinds."""
    hurt_and_compare(start_job, tmp_path, seed=SEED, count=A_FEW)


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
def test_a_hundred_random_faults_change_no_bit(start_job: StartJob, tmp_path: Path) -> None:
    """One job bears them all."""
    seed = int(os.environ.get("MIDSTEP_STORM_SEED") or random.randrange(1_000_000))
    hurt_and_compare(start_job, tmp_path, seed=seed, count=int(os.environ.get("MIDSTEP_STORM_FAULTS") or MANY))


def hurt_and_compare(start_job: StartJob, root: Path, *, seed: int, count: int) -> None:
    """Have so many faults come to a job, and compare it with one to which nothing happens."""
    rounds = list(draw(seed, count, RANKS, RANKS_PER_NODE))
    print(f"seed {seed}: {count} faults in {len(rounds)} rounds")
    shape = {"nodes": MACHINES, "ranks_per_node": RANKS_PER_NODE, "step_s": STEP_S}
    job = start_job(MACHINES + SPARES + 1, **shape, steps=WITHOUT_END, policy=POLICY)
    for number, faults in enumerate(rounds):
        one_round(job, number, faults, seed)
    recovered(job)
    for incident in job.stop()["incidents"]:
        if incident["outcome"] == "stopped":  # by this test
            continue
        assert incident["outcome"] in {"resumed", "dismissed"}, incident
        assert incident["steps_lost"] == 0, incident
        assert incident["healthy_pids_kept"], incident
    record = job.record()
    last = max(step for steps in record.steps.values() for step in steps)
    assert_same_steps(record, run_undisturbed(root / "undisturbed", ranks=RANKS, steps=last + 1))


def one_round(job: Job, number: int, faults: tuple[Fault, ...], seed: int) -> None:
    """Let the faults of a round come, and look who has new processes when all is well again."""
    before = recovered(job)
    print(f"round {number}, step {before.committed}: {'; '.join(map(str, faults))}", flush=True)
    hurt = Round(job, faults, seed + number)
    hurt.run()
    hurt.clear_up()
    after = recovered(job)
    holders = [{rank.rank: (rank.node, rank.pid) for rank in status.ranks} for status in (before, after)]
    unhurt = {rank for rank, (node, _) in holders[0].items() if job.machine_named(node).name not in hurt.hit}
    harmed = {rank for rank in unhurt if holders[0][rank] != holders[1][rank]}
    assert not harmed, f"seed {seed}, round {number}, {faults}: ranks {harmed} have new processes\n{job.said()}"


def recovered(job: Job) -> JobStatus:
    """Wait until training goes on, and both spares are there."""
    began = job.answer().committed
    return job.until(lambda now: all_there(now) and now.committed >= began + MEANWHILE, "training, and two spares")


def all_there(status: JobStatus) -> bool:
    """Whether the job runs, and as many spares wait as at the start."""
    return status.phase == "running" and sum(node.state == "spare" for node in status.nodes) == SPARES
