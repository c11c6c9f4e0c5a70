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

from ..chaos.comparing import assert_same_numbers, finish
from ..chaos.jobs import Job as LocalJob
from ..chaos.jobs import Record
from .conftest import StartJob
from .job import PATIENCE_S, Job
from .random_faults import Fault, Round, draw

pytestmark = [pytest.mark.machines]

MACHINES, RANKS_PER_NODE, SPARES = 4, 2, 2
RANKS = MACHINES * RANKS_PER_NODE
FIRST, EVERY = 5, 8  # steps: of the first gate, and from gate to gate
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
    "stall": {"grace_s": PATIENCE_S, "suspended_s": 3.0},  # a gate is no stall
    "deadlines": {"start_s": PATIENCE_S, "rejoin_s": PATIENCE_S, "quiesce_s": PATIENCE_S},
    "checkpoint": {"every_steps": 1000},  # what is kept is kept by copies alone
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
    """Run a job through so many faults, and compare it with one to which nothing happens."""
    rounds = list(draw(seed, count, RANKS, RANKS_PER_NODE))
    gates = tuple(range(FIRST, FIRST + (len(rounds) + 1) * EVERY, EVERY))
    steps = gates[-1] + FIRST
    print(f"seed {seed}: {count} faults in {len(rounds)} rounds")
    shape = {"nodes": MACHINES, "ranks_per_node": RANKS_PER_NODE, "step_s": 0.01}
    job = start_job(MACHINES + SPARES + 1, **shape, steps=steps, gates=gates, policy=POLICY)
    for number, (faults, gate, after) in enumerate(zip(rounds, gates, gates[1:], strict=False)):
        one_round(job, faults, gate, after, seed + number)
    job.held_at(gates[-1])
    job.open_gate(gates[-1])
    for incident in job.finish()["incidents"]:
        assert incident["outcome"] in {"resumed", "dismissed"}, incident
        assert incident["steps_lost"] == 0, incident
        assert incident["healthy_pids_kept"], incident
    quiet = LocalJob(root / "quiet", nodes=1, ranks_per_node=RANKS, steps=steps, step_s=0)
    try:
        assert not finish(quiet)["incidents"], quiet.said()
        undisturbed: Record = quiet.record()
    finally:
        quiet.close()
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


def one_round(job: Job, faults: tuple[Fault, ...], gate: int, after: int, seed: int) -> None:
    """Let faults come between two gates, and wait until all ranks run and all spares are back."""
    before = job.held_at(gate)
    job.until(all_there, "two spares")
    print(f"step {gate}: {'; '.join(map(str, faults))}", flush=True)
    round_ = Round(job, faults, seed)
    job.open_gate(gate)
    round_.run()
    recovered = job.held_at(after)
    round_.clear_up()
    hit = round_.hit
    holders = [{rank.rank: (rank.node, rank.pid) for rank in status.ranks} for status in (before, recovered)]
    harmed = {rank for rank in holders[0] if holders[0][rank] != holders[1][rank] and holders[0][rank][0] not in hit}
    assert not harmed, f"seed {seed}, step {gate}, {faults}: ranks {harmed} have new processes\n{job.said()}"


def all_there(status: JobStatus) -> bool:
    """Whether as many spares wait as at the start."""
    return status.phase == "running" and sum(node.state == "spare" for node in status.nodes) == SPARES
