"""torchelastic's contract between agents and workers, sentence by sentence, where it binds midstep.

Its "restart of the worker group" is a restart of the world of a script that knows nothing of midstep; a resilient job
is better off, and keeps what the contract promises.
"""

import pytest

from midstep.controller.recovery.state import Phase
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import Quiesce, Release, StartProcess
from midstep.protocol.types import FaultKind, Rung
from midstep.testing.answering_cluster import AnsweringCluster


def plain(max_restarts: int, **more: int) -> AnsweringCluster:
    """A job as torchrun would start it."""
    return AnsweringCluster(resilient=False, max_restarts=max_restarts, **more).start()  # type: ignore[arg-type]


def test_worker_failure_restarts_all_workers_while_restarts_are_left() -> None:
    """A new round for everybody, on the same nodes, with the number of the restart in every worker's environment."""
    job = plain(2)
    before, sent = job.pids_now(), len(job.sent)

    job.kill(3, 1)

    starts = job.commands(StartProcess, sent)
    assert [start.rank for start in starts] == [0, 1, 2, 3]
    assert {start.restart_count for start in starts} == {1}
    assert {start.generation for start in starts} == {2}
    assert job.replaced_since(before) == {0, 1, 2, 3}


def test_max_restarts_zero_ends_the_job_at_the_first_failure() -> None:
    """There is nothing to take from; the reason names the budget, and the exit code is not 0."""
    job = plain(0)

    job.kill(1, 3)

    assert job.outcome.exit_code != 0
    assert "max-restarts is spent: 0 of 0" in job.outcome.reason


@pytest.mark.parametrize("ranks", [(1, 1, 1), (0, 2, 3), (3, 0, 1)])
def test_restart_budget_is_counted_once_and_globally(ranks: tuple[int, ...]) -> None:
    """torchelastic's agents count each for itself; here two restarts are two, on whichever nodes the failures were."""
    job = plain(2)

    for rank in ranks[:-1]:
        job.kill(rank, 1)
        assert job.finish is None
    job.kill(ranks[-1], 1)

    assert "max-restarts is spent: 2 of 2 in this job" in job.outcome.reason
    assert job.machine.state.accounts.restarts == 2


def test_restart_budget_survives_the_controller() -> None:
    """A count in a process is gone with it; this one is counted from the journal."""
    job = plain(1)
    job.kill(0, 1)

    job.restart_controller()
    job.kill(0, 1)

    assert "max-restarts is spent: 1 of 1" in job.outcome.reason


def test_failures_that_come_together_are_one_restart() -> None:
    """All workers of a collective fail when one does: that is one failure."""
    job = plain(1)
    processes = [job.vanish(rank) for rank in range(4)]

    job.feed(*(job.end_of(process, 1) for process in processes))
    job.settle()

    assert job.machine.state.accounts.restarts == 1
    assert job.finish is None


def test_membership_change_is_free() -> None:
    """A node that joins interrupts nobody and costs no restart."""
    job = plain(1)
    before, sent = job.pids_now(), len(job.sent)

    job.node_joins("node9")
    job.settle()

    assert job.pids_now() == before
    assert job.commands(StartProcess, sent) == job.commands(Quiesce, sent) == []
    assert job.machine.state.spent == ()


def test_five_joins_and_then_a_fault_find_the_whole_budget() -> None:
    """The rung that would restart everybody may be taken once, and a world that has grown five times still has it."""
    ladder = "[{rung: reschedule_pod, budget: {per_job: 1}}, {rung: stop}]"
    policy = f"ladder: {ladder}\nscale: {{min_nodes: 1, min_interval_s: 1, last_call_s: 1}}"
    job = AnsweringCluster(policy, nodes=6, spares=0)
    job.node_joins("node0")
    job.settle()
    job.wait_until(Phase.RUNNING)
    for number in range(1, 6):
        job.train(100)
        job.node_joins(f"node{number}")
        job.settle()
        job.wait_until(Phase.RUNNING)
        assert len(job.processes) == 2 * (number + 1)
    assert job.machine.state.spent == ()

    job.kill(3)

    assert job.rungs == [Rung.RESCHEDULE_POD]
    assert job.incidents[-1].outcome is Outcome.RESUMED
    assert len(job.processes) == 12


def test_loss_of_a_node_that_holds_no_rank_is_free() -> None:
    """A spare that goes away is nobody's failure."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.lose_node("node2")

    assert job.pids_now() == before
    assert job.incidents == ()
    assert job.machine.state.spent == ()


def test_late_joiner_waits() -> None:
    """A world that is complete is not torn down for a new node: its agent waits, as a spare."""
    job = AnsweringCluster().start()
    job.node_joins("late")
    job.settle()
    assert {node.node: node.state for node in job.machine.status(job.now).nodes}["late"] == "spare"
    job.now += 100_000

    job.lose_node("node0")
    job.lose_node("node1")

    assert {process.node for process in job.processes.values()} == {"node2", "late"}
    assert job.phase is Phase.RUNNING


def test_job_waits_for_its_nodes_and_says_so_when_they_do_not_come() -> None:
    """Rendezvous with a timeout: too few nodes end the job with the number of seconds that were waited."""
    job = AnsweringCluster()
    job.node_joins("node0")
    assert job.phase is Phase.WAITING

    job.wait()

    assert job.outcome.exit_code == 1
    assert job.outcome.reason == "too few nodes came within 270 s"


def test_finalization_barrier_holds_the_first_until_the_last() -> None:
    """Ranks whose train function has returned are kept until all have: then all are let go together."""
    job = AnsweringCluster().start()

    for rank in (0, 1, 2):
        job.rank_finishes(rank)
    job.settle()
    assert job.commands(Release) == []
    job.rank_finishes(3)
    job.settle()

    assert [release.rank for release in job.commands(Release)] == [0, 1, 2, 3]
    assert job.outcome.exit_code == 0


def test_finalization_barrier_has_a_timeout() -> None:
    """Who has not finished within `deadlines.finish_s` of the first is named, and the job does not end with 0."""
    job = AnsweringCluster("deadlines: {finish_s: 42}").start()
    job.rank_finishes(0)
    first_s = job.now

    job.rank_finishes(1)
    job.wait()

    assert job.now - first_s == pytest.approx(42, abs=0.1)
    assert job.outcome.exit_code == 1
    assert job.outcome.reason == "ranks 2, 3 did not finish within 42 s of the others"


def test_finalization_barrier_covers_the_way_out_too() -> None:
    """A process that was let go and does not leave is waited for as long, and no longer."""
    job = AnsweringCluster("deadlines: {finish_s: 42}").start()
    job.mute = lambda body: isinstance(body, Release) and body.rank == 2
    job.complete()
    assert job.phase is Phase.FINISHING

    job.wait()

    assert job.outcome.exit_code == 1


def test_failure_of_one_while_others_have_finished_is_recovered() -> None:
    """torchelastic ends the job when one agent is done; here those who are done wait, and help."""
    job = AnsweringCluster().start()
    before = job.pids_now()
    job.rank_finishes(0)
    job.rank_finishes(1)

    job.kill(3)

    assert job.replaced_since(before) == {3}
    assert job.rungs == [Rung.RECOVER_IN_PLACE]
    assert job.phase is Phase.RUNNING
    job.complete()
    assert job.outcome.exit_code == 0


@pytest.mark.parametrize("resilient", [True, False])
def test_one_worker_failing_for_ever_ends_the_job(resilient: bool) -> None:
    """However often it comes back, it has an end, with the reason of every way that was tried."""
    job = AnsweringCluster(resilient=resilient, max_restarts=5, creates_nodes=True).start()
    job.checkpoints = (5,)

    failures = 0
    while job.finish is None:
        job.kill(1, 1)
        failures += 1
        assert failures < 100

    assert job.outcome.exit_code == 1
    assert "is spent" in job.outcome.reason


def test_one_worker_that_never_starts_ends_the_job() -> None:
    """Not even joining: deadline after deadline, rung after rung, and then the stop."""
    job = AnsweringCluster(creates_nodes=True).start()
    job.checkpoints = (5,)
    job.never_joins = {0, 1, 2, 3}
    job.kill(1)

    job.wait_until(Phase.ENDED)

    assert job.outcome.exit_code == 1
    assert job.rungs[-1] is Rung.STOP


def test_workers_on_other_agents_are_ended_when_the_job_is() -> None:
    """When the job is given up no process of it is left anywhere."""
    job = plain(0)
    job.kill(0, 1)

    told = {action for action in job.commands(object) if type(action).__name__ == "EndJob"}
    assert len(told) == 1
    assert sum(type(body).__name__ == "EndJob" for body in job.sent) == 3 + 1  # every agent, and the platform


def test_scale_down_is_noticed_without_a_word_of_the_workers() -> None:
    """torchelastic's rendezvous does not tell its agents when one is gone; here the loss alone starts the recovery."""
    job = AnsweringCluster().start()
    job.train(3)

    job.lose_node("node1")

    assert job.incidents[-1].reports[0].kind is FaultKind.NODE_LOST
    assert job.rungs == [Rung.RECOVER]
    assert job.incidents[-1].steps_lost == 0


@pytest.mark.parametrize("name", ["node0", "node1"])
def test_scale_down_works_after_one_agent_has_finished(name: str) -> None:
    """torchelastic's does not: the first agent that is done closes the rendezvous. Here either node may still go."""
    job = AnsweringCluster().start()
    job.rank_finishes(0)
    job.rank_finishes(1)

    job.lose_node(name)

    assert job.phase is Phase.RUNNING
    assert job.rungs == [Rung.RECOVER]
    job.complete()
    assert job.outcome.exit_code == 0


def test_scale_down_with_restarts_left_starts_a_new_round() -> None:
    """A script that is not resilient goes on with a spare in the place of the node that went."""
    job = plain(1)

    job.lose_node("node1")

    assert {process.node for process in job.processes.values()} == {"node0", "node2"}
    assert job.machine.state.accounts.restarts == 1


def test_scale_down_without_restarts_is_left_to_whoever_started_the_job() -> None:
    """With `--max-restarts 0` the job ends, says why, and the scheduler may start it again."""
    job = plain(0)

    job.lose_node("node1")

    assert job.outcome.exit_code != 0
    assert "node node1 went away" in job.outcome.reason
