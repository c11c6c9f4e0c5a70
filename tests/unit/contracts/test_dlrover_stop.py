"""DLRover Unified, the cases in which it requests a stop: the limits that end a job, each named in the reason."""

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import CreateNode, StartProcess
from midstep.protocol.types import FaultKind, FaultLevel
from midstep.testing.answering_cluster import AnsweringCluster

JOB_LIMIT = "ladder: [{rung: recover_in_place, budget: {per_job: 2}}, {rung: stop}]"
RANK_LIMIT = "ladder: [{rung: recover_in_place, budget: {per_rank: 2}}, {rung: stop}]"
NODE_LIMIT = "ladder: [{rung: recover_in_place, budget: {per_node: 2}}, {rung: stop}]"
RELAUNCH_LIMIT = "ladder: [{rung: recover, budget: {per_job: 1, window_s: 0}}, {rung: stop}]"


def test_stop_on_the_limit_of_an_actor_names_the_actor() -> None:
    """Rank 1 has been restarted as often as it may; other ranks have not, and would be."""
    job = AnsweringCluster(RANK_LIMIT).start()
    job.kill(1)
    job.kill(1)
    job.kill(2)
    assert job.phase is Phase.RUNNING

    job.kill(1)

    assert "budget per_rank of rank 1 is spent: 2 of 2 within 3600 s" in job.outcome.reason
    assert job.outcome.exit_code == 1


def test_stop_on_the_limit_of_a_node_names_the_node() -> None:
    """Two different ranks of one node failed, and then the first again."""
    job = AnsweringCluster(NODE_LIMIT, spares=0).start()
    job.kill(2)
    job.kill(3)

    job.kill(2)

    assert "budget per_node of node node1 is spent: 2 of 2" in job.outcome.reason


def test_stop_on_the_limit_of_node_relaunches_names_it() -> None:
    """One node was replaced; the second may not be."""
    job = AnsweringCluster(RELAUNCH_LIMIT, spares=2).start()
    job.lose_node("node0")
    assert job.phase is Phase.RUNNING

    job.lose_node("node1")

    assert "recover: budget per_job is spent: 1 of 1 in this job" in job.outcome.reason


def test_stop_on_the_limit_of_the_job_names_the_job() -> None:
    """Whoever fails: the job has been helped as often as it may."""
    job = AnsweringCluster(JOB_LIMIT).start()
    job.kill(0)
    job.kill(1)

    job.kill(2)

    assert "recover_in_place: budget per_job is spent: 2 of 2" in job.outcome.reason


def test_stop_on_the_limit_of_restarts_of_the_job_names_it() -> None:
    """A script that is not resilient: `--max-restarts` is the limit."""
    job = AnsweringCluster(resilient=False, max_restarts=1).start()
    job.kill(0, 1)

    job.kill(3, 1)

    assert "budget max-restarts is spent: 1 of 1 in this job" in job.outcome.reason


@pytest.mark.parametrize("limit", [RANK_LIMIT, NODE_LIMIT, JOB_LIMIT])
def test_limit_that_was_spent_long_ago_does_not_stop(limit: str) -> None:
    """Counted over a sliding window: what failed more than an hour ago is forgiven."""
    job = AnsweringCluster(limit).start()
    for _ in range(2):
        job.kill(1)
    job.now += 3601

    job.kill(1)

    assert job.phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("policy", "ranks"), [(RANK_LIMIT, (1, 1, 1)), (NODE_LIMIT, (2, 3, 2)), (JOB_LIMIT, (0, 1, 2))]
)
def test_nothing_goes_on_after_the_stop(policy: str, ranks: tuple[int, ...]) -> None:
    """DLRover's limit of node relaunches asks for the stop and goes on with the failover: here nothing is started."""
    job = AnsweringCluster(policy, spares=0).start()
    for rank in ranks[:-1]:
        job.kill(rank)
    sent = len(job.sent)

    job.kill(ranks[-1])
    first = job.outcome
    job.suffer(FaultKind.EXCEPTION, 0)
    job.device_fault(3, FaultLevel.RESTART_NPU)
    job.lose_node("node0")
    job.node_joins("node7")
    job.settle()

    assert job.commands(StartProcess, sent) == job.commands(CreateNode, sent) == []
    assert job.outcome == first
    assert job.phase is Phase.ENDED


def test_stop_saves_what_the_survivors_hold() -> None:
    """At a limit, too, there is an emergency checkpoint of the last committed step, and the reason says where."""
    job = AnsweringCluster(RANK_LIMIT).start()
    for _ in range(3):
        job.kill(1)

    assert "an emergency checkpoint of step 8 is at /checkpoints/emergency" in job.outcome.reason
