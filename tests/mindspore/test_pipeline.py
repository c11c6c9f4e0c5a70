"""A pipeline of two stages with MindSpore's own fault tolerance: two ranks hold each stage.

MindSpore names who holds the same when its first step has ended, so a process that replaces another one cannot.
"""

from pathlib import Path

import pytest

from midstep.protocol.types import Rung

from .jobs import RANKS, processes
from .test_model_train import Fault, assert_same_numbers, await_step, expected, handlers, held_at, run

STAGES = 2
KILLS: tuple[Fault, ...] = ((2, 4, "before", "kill"), (0, 9, "update", "kill"), (3, 14, "barrier", "kill"))
LOST, LOST_AT = 2, 17  # the rank whose node is lost, and with it what its process has noted
FAULTS = (*KILLS, (LOST, LOST_AT, "before", "kill"))
RESUMED = (4, 10, 14, LOST_AT)
PEERS = {0: 1, 1: 0, 2: 3, 3: 2}
NODES = ("--nnodes", str(RANKS), "--nproc-per-node", "1", "--spares", "1")


@pytest.mark.timeout(700)
def test_a_rank_gets_its_stage_from_the_other_rank_of_it(tmp_path: Path) -> None:
    """Ranks of both stages are killed, and a node: healthy processes stay, no step is lost, no bit changes."""
    calm = run(tmp_path / "calm", stages=STAGES)
    assert calm.finish() == []
    gate = held_at(tmp_path / "job", LOST_AT)
    job = run(tmp_path / "job", KILLS, stages=STAGES, options=NODES)
    await_step(job, LOST_AT)
    [process] = processes(job, f"midstep-r{LOST}")
    agent = process.parent()
    assert agent is not None
    agent.kill()
    gate.unlink()
    incidents = job.finish()

    assert [set(each.replaced) for each in incidents] == [{rank} for rank, *_ in FAULTS]
    assert [each.rung for each in incidents] == [*[Rung.RECOVER_IN_PLACE] * len(KILLS), Rung.RECOVER]
    assert [each.resumed_step for each in incidents] == list(RESUMED)
    assert all(each.healthy_pids_kept and each.steps_lost == 0 for each in incidents)
    assert_same_numbers(job, calm, STAGES)
    for rank in range(RANKS):
        for life in (1, 2, 3):
            assert handlers(job, rank, life) == expected(rank, life, FAULTS, RESUMED, PEERS)
