"""A pipeline of two stages with MindSpore's own fault tolerance: two ranks hold each stage.

MindSpore names who holds the same when its first step has ended, so a process that replaces another one cannot.
"""

from pathlib import Path

import pytest

from .jobs import RANKS
from .test_model_train import Fault, assert_same_numbers, expected, handlers, run

STAGES = 2
FAULTS: tuple[Fault, ...] = ((2, 4, "before", "kill"), (0, 9, "update", "kill"), (3, 14, "barrier", "kill"))
RESUMED = (4, 10, 14)
PEERS = {0: 1, 1: 0, 2: 3, 3: 2}


@pytest.mark.timeout(700)
def test_a_rank_gets_its_stage_from_the_other_rank_of_it(tmp_path: Path) -> None:
    """Ranks of both stages are killed: healthy processes stay, no step is lost, no bit changes."""
    calm = run(tmp_path / "calm", stages=STAGES)
    assert calm.finish() == []
    job = run(tmp_path / "job", FAULTS, stages=STAGES)
    incidents = job.finish()

    assert [set(each.replaced) for each in incidents] == [{rank} for rank, *_ in FAULTS]
    assert [each.resumed_step for each in incidents] == list(RESUMED)
    assert all(each.healthy_pids_kept and each.steps_lost == 0 for each in incidents)
    assert_same_numbers(job, calm, STAGES)
    for rank in range(RANKS):
        for life in (1, 2):
            assert handlers(job, rank, life) == expected(rank, life, FAULTS, RESUMED, PEERS)
