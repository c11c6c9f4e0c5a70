"""DLRover Unified, "Worker Failover" and "SubMaster Failover": who is restarted when a worker fails, and who is not.

A worker with a sub-master is a rank of a resilient job: the failure is dealt with where it happened. One without is a
rank of a script that knows nothing of midstep, or of a role without a ladder (`test_dlrover_roles.py`): the job starts
again as a whole.
"""

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import Quiesce, Rejoin, Resume, StartProcess
from midstep.protocol.types import FaultKind, Rung
from midstep.testing.answering_cluster import AnsweringCluster


def test_worker_with_sub_master_is_restarted_without_the_job() -> None:
    """Only the worker that failed gets a new process; its count goes up by one."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.kill(1)

    assert job.replaced_since(before) == {1}
    assert job.rungs == [Rung.RECOVER_IN_PLACE]
    assert job.machine.state.accounts.restarts == 0
    assert {use.name: use.used for use in job.machine.status(job.now).budgets}["recover_in_place per rank"] == 1


def test_worker_without_sub_master_restarts_the_job() -> None:
    """Nobody can be kept, so everybody is restarted, and it counts as one restart of the job."""
    job = AnsweringCluster(resilient=False, max_restarts=3).start()
    before = job.pids_now()

    job.kill(1, 1)

    assert job.replaced_since(before) == {0, 1, 2, 3}
    assert job.machine.state.accounts.restarts == 1
    assert job.finish is None


def test_reports_of_restarts_while_restarting_are_ignored() -> None:
    """The ends of workers that were killed for the restart are no failures: one incident, one restart."""
    job = AnsweringCluster(resilient=False, max_restarts=3).start()
    old = list(job.processes.values())

    job.kill(1, 1)
    job.feed(*(job.end_of(process, expected=True) for process in old))
    job.settle()

    assert len(job.incidents) == 1
    assert job.machine.state.accounts.restarts == 1


def test_role_failover_waits_until_all_are_ready_and_then_runs_again() -> None:
    """No worker goes on before the restarted one is there; then all go on together."""
    job = AnsweringCluster().start()
    job.never_joins.add(1)
    sent = len(job.sent)

    job.kill(1)

    assert job.phase is Phase.QUIESCING
    assert job.commands(Rejoin, sent) == job.commands(Resume, sent) == []
    job.never_joins.clear()
    job.wait_until(Phase.RUNNING)
    assert {resume.rank for resume in job.commands(Resume, sent)} == {0, 1, 2, 3}


def test_role_failover_supports_deduplication() -> None:
    """The same failure, told by the worker, by its agent and again by both, is dealt with once."""
    job = AnsweringCluster().start()
    process = job.vanish(1)
    exited = job.end_of(process)

    job.report(FaultKind.EXCEPTION, 1)
    job.feed(exited, exited)
    job.settle()
    job.feed(exited)
    job.settle()

    assert len(job.commands(StartProcess)) == 5
    assert len(job.incidents) == 1
    assert job.phase is Phase.RUNNING


def test_role_failover_supports_multiple_recovery_attempts() -> None:
    """A restart that does not succeed is tried again, and then something else."""
    job = AnsweringCluster().start()
    job.never_joins.add(1)
    job.kill(1)

    job.wait()
    job.wait()
    job.never_joins.clear()
    job.wait_until(Phase.RUNNING)

    assert len(job.incidents) == 1
    assert len(job.rungs) > 1


def test_failover_training() -> None:
    """A worker ends its own process once while training: the job still ends with 0, and was not restarted."""
    job = AnsweringCluster().start()
    job.kill(2, 1)
    job.train(10)

    job.complete()

    assert job.outcome.exit_code == 0
    assert job.machine.state.accounts.restarts == 0


def test_failover_entire_job() -> None:
    """After the loss of every worker the job starts again once, and ends with 0."""
    job = AnsweringCluster(creates_nodes=True).start()
    job.checkpoints = (5,)
    for rank in range(4):
        process = job.vanish(rank)
        job.feed(job.end_of(process))
    job.settle()
    job.complete()

    assert job.machine.state.accounts.restarts == 1
    assert job.outcome.exit_code == 0


def test_error_without_failover() -> None:
    """Where the policy has no way to recover, the first failure ends the job, not with 0."""
    job = AnsweringCluster("ladder: [{rung: stop}]").start()

    job.kill(0, 1)

    assert job.outcome.exit_code != 0
    assert "the policy has no other rung" in job.outcome.reason


def test_error_with_job_failover() -> None:
    """With one restart of the job allowed, the second failure ends it, not with 0."""
    job = AnsweringCluster(resilient=False, max_restarts=1).start()

    job.kill(0, 1)
    assert job.finish is None
    job.kill(0, 1)

    assert job.outcome.exit_code != 0


def test_comm_fault() -> None:
    """The first check of the links fails: it is done again, all together, nobody is restarted, the job ends with 0."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    job.mute = lambda body: isinstance(body, Rejoin) and body.generation == 2
    job.suffer(FaultKind.COMMUNICATION, 0)
    job.wait()
    job.expect(Phase.REJOINING)

    job.suffer(FaultKind.LINK_UP, 3)
    job.wait()

    assert job.phase is Phase.RUNNING
    assert job.machine.generation == 3
    assert job.rungs == [Rung.RETRY_STEP]
    assert job.replaced_since(before) == set()
    job.complete()
    assert job.outcome.exit_code == 0


def test_comm_fault_of_one_node_again_and_again_is_not_retried_for_ever() -> None:
    """After its attempts the check has failed, and the ladder goes on."""
    job = AnsweringCluster().start()
    job.mute = lambda body: isinstance(body, Rejoin) and job.machine.state.accounts.restarts == 0
    job.suffer(FaultKind.COMMUNICATION, 0)
    job.wait()

    for _ in range(5):
        job.suffer(FaultKind.LINK_UP, 3)
        job.wait()

    assert "no communicators after 5 attempts" in job.skipped(Rung.RETRY_STEP)
    assert job.rungs[0] is Rung.RETRY_STEP
    assert job.rungs[-1] is not Rung.RETRY_STEP
    assert job.phase is Phase.RUNNING


@pytest.mark.parametrize("restarts", [1, 3])
def test_sub_master_failover_is_a_stateless_retry(restarts: int) -> None:
    """A controller that comes again, also several times, takes up the running job: nobody is told to do anything."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    sent = len(job.sent)

    for _ in range(restarts):
        job.restart_controller()
        job.settle()

    assert job.commands(Quiesce, sent) == job.commands(StartProcess, sent) == []
    assert job.pids_now() == before
    assert job.phase is Phase.RUNNING


def test_sub_master_failover_in_the_middle_of_a_worker_s() -> None:
    """The next controller finishes what the last one began; the worker is restarted once."""
    job = AnsweringCluster().start()
    process = job.vanish(1)
    job.feed(job.end_of(process))

    job.restart_controller()
    job.settle()

    assert job.phase is Phase.RUNNING
    assert len(job.incidents) == 1
    assert job.processes[1].incarnation == 2


def test_agent_that_comes_again_keeps_its_workers() -> None:
    """What a node's own master says at its return is compared, not acted on: its processes are those that are known."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    sent = len(job.sent)

    job.node_joins("node0")
    job.settle()

    assert [type(body).__name__ for body in job.sent[sent:]] == ["WelcomeNode"]
    assert job.pids_now() == before
