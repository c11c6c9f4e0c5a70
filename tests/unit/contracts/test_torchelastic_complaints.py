"""Users of torchelastic complain about these, with the numbers of pytorch's issues: each test asserts the opposite."""

import pytest

from midstep.controller.liveness import Liveness
from midstep.controller.recovery.state import Phase
from midstep.policies.files import parse_policy
from midstep.policies.rules import job_settings
from midstep.policies.schema import HeartbeatPolicy
from midstep.protocol.messages import NodeJoined, NodeLost, Quiesce, Rejoin, StartProcess, StopProcess
from midstep.protocol.types import FaultKind, Rung
from midstep.testing.answering_cluster import AnsweringCluster


def test_restart_count_is_the_same_for_every_worker() -> None:
    """#108158: each agent counts for itself, so workers disagree about which round it is."""
    job = AnsweringCluster(resilient=False, max_restarts=5, nodes=3).start()

    for rank in (0, 4, 2):
        sent = len(job.sent)
        job.kill(rank, 1)

        starts = job.commands(StartProcess, sent)
        assert len({(start.restart_count, start.generation) for start in starts}) == 1
        assert len(starts) == 6


def test_every_generation_meets_under_a_name_of_its_own() -> None:
    """#135712: stale communicator ids of the last round are found by the next."""
    job = AnsweringCluster().start()
    for rank in (1, 3, 0):
        job.kill(rank)

    generations = [rejoin.generation for rejoin in job.commands(Rejoin)]
    assert generations == sorted(generations)
    assert len(set(generations)) == 4
    assert all(generations.count(each) == 4 for each in set(generations))


def test_quick_rejoin_does_not_bypass_the_budget() -> None:
    """#147064: an agent that leaves and joins again before its loss is noticed gets its restarts for nothing."""
    job = AnsweringCluster("ladder: [{rung: recover, budget: {per_job: 1, window_s: 0}}, {rung: stop}]").start()
    for _ in range(2):
        job.lose_node("node1" if job.processes[2].node == "node1" else job.processes[2].node)
        job.node_joins("node1")
        job.settle()

    assert job.outcome.exit_code == 1
    assert "budget per_job is spent: 1 of 1" in job.outcome.reason


def test_agent_that_comes_back_with_workers_of_a_lost_life_has_them_stopped() -> None:
    """Their ranks have been given to others meanwhile: nobody may hold a rank twice."""
    job = AnsweringCluster().start()
    old = job.processes[2]
    job.lose_node("node1")
    sent = len(job.sent)

    running = old.running
    job.feed(NodeJoined("node1", "node1", job.store("node1"), (running,)))
    job.settle()

    assert [(stop.rank, stop.incarnation) for stop in job.commands(StopProcess, sent)] == [(2, 1)]
    assert job.phase is Phase.RUNNING


def test_signal_to_one_agent_does_not_close_the_job_for_everyone() -> None:
    """#67742, #123678, #152525: SIGTERM to one agent closes the rendezvous, and all others end."""
    job = AnsweringCluster().start()
    before = job.pids_now()

    job.lose_node("node1")

    assert job.replaced_since(before) == {2, 3}
    assert job.phase is Phase.RUNNING
    job.complete()
    assert job.outcome.exit_code == 0


def test_missing_keep_alive_is_a_lost_node() -> None:
    """#111646: the missing heartbeat of an agent does not lead to a restart."""
    job = AnsweringCluster().start()
    liveness = Liveness(HeartbeatPolicy())
    for event, at_s in job.journal:
        liveness.learn(event, at_s)
    liveness.start(job.now)
    quiet_s = 0.0
    while not (lost := liveness.judge(job.now + quiet_s)):
        quiet_s += 0.25
        liveness.hear("node0", job.now + quiet_s)
        liveness.hear("node2", job.now + quiet_s)
    assert quiet_s <= 4.0

    job.drop_node("node1")
    job.feed(*lost)
    job.settle()

    assert [event.node for event in lost if isinstance(event, NodeLost)] == ["node1"]
    assert job.rungs == [Rung.RECOVER]


def test_scale_down_of_a_node_in_use_recovers() -> None:
    """#91943, #182221: when one of 1:2 nodes is taken away the others fail, one of them by an assertion."""
    for name in ("node0", "node1"):
        job = AnsweringCluster().start()
        job.lose_node(name)

        assert job.phase is Phase.RUNNING


@pytest.mark.parametrize("name", ["node0", "node1"])
def test_node_that_leaves_while_the_job_starts_is_replaced(name: str) -> None:
    """#182221: also before anybody has trained."""
    job = AnsweringCluster(never_joins={0, 1, 2, 3}, max_restarts=1)
    for number in range(3):
        job.node_joins(f"node{number}")
    job.settle()
    job.never_joins.clear()
    job.expect(Phase.STARTING)

    job.lose_node(name)

    assert job.phase is Phase.RUNNING
    assert name not in {process.node for process in job.processes.values()}


def test_loss_of_the_store_host_is_survivable() -> None:
    """#135712, #167301, #167302, #168242: the loss of the node with the rendezvous store ends everything."""
    job = AnsweringCluster().start()
    assert {rejoin.store.host for rejoin in job.commands(Rejoin)} == {"node0"}
    before, sent = job.pids_now(), len(job.sent)

    job.lose_node("node0")

    assert job.replaced_since(before) == {0, 1}
    assert {rejoin.store.host for rejoin in job.commands(Rejoin, sent)} == {"node2"}
    assert job.phase is Phase.RUNNING


def test_rank_0_is_a_rank_like_any_other() -> None:
    """#118891: who has rank 0 takes the others along."""
    results = []
    for rank in range(4):
        job = AnsweringCluster().start()
        before = job.pids_now()
        job.kill(rank)
        results.append((job.replaced_since(before) == {rank}, job.rungs, job.incidents[-1].steps_lost))

    assert results == [(True, [Rung.RECOVER_IN_PLACE], 0)] * 4


def test_only_one_node_is_restarted() -> None:
    """#136312: "restart only one node" is asked for."""
    job = AnsweringCluster(nodes=4, ranks_per_node=8).start()
    before = job.pids_now()

    job.lose_node("node2")

    assert job.replaced_since(before) == set(range(16, 24))


def test_others_do_not_run_on_when_one_fails() -> None:
    """#146371: the workers that are left go on, or hang in a collective until it times out."""
    job = AnsweringCluster().start()
    sent = len(job.sent)
    process = job.vanish(1)

    job.feed(job.end_of(process))

    assert {quiesce.rank for quiesce in job.commands(Quiesce, sent)} == {0, 2, 3}


def test_ranks_do_not_change_places() -> None:
    """DLRover #450: after a restart ranks are dealt out again, in any order."""
    job = AnsweringCluster(resilient=False, max_restarts=5, nodes=3).start()
    before = {rank: process.node for rank, process in job.processes.items()}

    job.kill(2, 1)
    assert {rank: process.node for rank, process in job.processes.items()} == before
    job.lose_node("node1")

    after = {rank: process.node for rank, process in job.processes.items()}
    assert {rank: node for rank, node in after.items() if before[rank] != "node1"} == {
        rank: node for rank, node in before.items() if node != "node1"
    }


def test_timeouts_are_settings() -> None:
    """#118891, #119856: 300 s at the exit barrier and 30 s before SIGKILL are hard-wired."""
    policy = parse_policy("deadlines: {finish_s: 7, stop_grace_s: 120}", "here")

    assert policy.deadlines.finish_s == 7
    assert job_settings(policy, "/").stop_grace_s == 120


def test_timeout_at_the_end_is_not_a_success() -> None:
    """There a failed exit barrier is logged, and the agent says SUCCEEDED."""
    job = AnsweringCluster().start()
    job.rank_finishes(0)

    job.wait()

    assert job.outcome.exit_code != 0


def test_failure_is_attributed_to_its_rank() -> None:
    """torchrun prints the first error of the local agent; here the report names rank, node and what was seen."""
    job = AnsweringCluster().start()
    for victim in (0, 3):
        job.report(FaultKind.COMMUNICATION, victim)
    job.kill(2, -11)

    culprits = [report for report in job.incidents[-1].reports if report.kind is FaultKind.EXIT]
    assert [(report.rank, report.node, report.detail) for report in culprits] == [
        (2, "node1", "the process was ended by SIGSEGV")
    ]
    assert "rank 2" in job.incidents[-1].decisions[-1].reason
