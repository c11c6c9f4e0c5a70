"""How often the processes of a node fail, that it is left when they fail too often, and what does not count."""

import msgspec

from midstep.controller.recovery.events import DeadlinePassed
from midstep.controller.recovery.world import NodeState
from midstep.policies.budgets import NodeFailure
from midstep.policies.ladder import Ladder
from midstep.policies.rules import advice
from midstep.policies.schema import Budget, NodePolicy, Policy, RungPolicy
from midstep.protocol.controls import ReleaseNode
from midstep.protocol.messages import FaultReported, NodeLost, ProcessExited, StartProcess
from midstep.protocol.types import Assertion, FaultKind, FaultReport, Rung, RunningProcess
from midstep.testing.fake_cluster import FakeCluster, job, only

from .test_controls import ask
from .test_policies_ladder import facts_of, fault

LADDER = (
    RungPolicy(Rung.RECOVER_IN_PLACE, attempts=9, budget=Budget(per_job=99)),
    RungPolicy(Rung.RECOVER, attempts=9, budget=Budget(per_job=99)),
    RungPolicy(Rung.RESCHEDULE_POD, attempts=9, budget=Budget(per_job=99)),
    RungPolicy(Rung.STOP),
)


def running(
    failures: int | None = 2, window_s: float = 100.0, *, spares: int = 1, creates: bool = False
) -> FakeCluster:
    """A running job whose nodes may fail so often."""
    policy = Policy(ladder=LADDER, node=NodePolicy(failures, window_s))
    cluster = FakeCluster(job(spares=spares), policy, creates=creates)
    cluster.start()
    return cluster


def failures(cluster: FakeCluster) -> dict[str, int]:
    """The counts as status shows them."""
    return {node.node: node.failures for node in cluster.machine.status(cluster.now).nodes if node.failures}


def test_a_node_that_fails_once_more_than_allowed_is_left_and_the_reason_says_so() -> None:
    cluster = running()
    for step in (1, 2):
        cluster.feed(cluster.exited(0))
        cluster.recover(step)
    assert failures(cluster) == {"node0": 2}
    cluster.feed(cluster.exited(1))
    decision = cluster.machine.incidents[-1].decisions[-1]
    words = "node node0 has had 3 failures within 100 s, node.failures is 2"
    assert decision.rung is Rung.RECOVER
    assert words in decision.reason
    assert [(skipped.rung, skipped.reason) for skipped in decision.skipped] == [(Rung.RECOVER_IN_PLACE, words)]
    assert [cluster.holder(rank).node for rank in range(4)] == ["node2", "node2", "node1", "node1"]


def test_the_node_that_takes_its_place_starts_counting_from_zero() -> None:
    cluster = running(failures=1, spares=1)
    for step in (1, 2):
        cluster.feed(cluster.exited(0))
        cluster.recover(step)
    assert cluster.holder(0).node == "node2"
    cluster.feed(cluster.exited(0))
    assert cluster.machine.incidents[-1].rung is Rung.RECOVER_IN_PLACE
    assert failures(cluster)["node2"] == 1


def test_a_restart_that_a_replacement_causes_is_no_failure() -> None:
    """The neighbour of the culprit moves, and the end of its process is reported by the node that was left."""
    cluster = running(failures=1)
    cluster.feed(cluster.exited(0))
    cluster.recover(1)
    old = cluster.holder(1)
    process = RunningProcess(1, old.pid, old.incarnation, cluster.machine.generation)
    cluster.feed(cluster.exited(0))
    before = failures(cluster)
    cluster.feed(ProcessExited("node0", process, -9, cluster.now, expected=True))
    cluster.recover(2)
    assert failures(cluster) == before == {"node0": 2}


def test_what_a_node_reports_that_was_left_is_not_counted() -> None:
    """Neither of its former ranks nor of the node they run on now."""
    cluster = running(failures=1)
    for step in (1, 2):
        cluster.feed(cluster.exited(0))
        cluster.recover(step)
    late = FaultReport(FaultKind.UNRESPONSIVE, cluster.now, "node/node0", "late", rank=0, node="node0")
    assert cluster.feed(FaultReported(late)) == []
    assert failures(cluster) == {"node0": 2}
    assert cluster.machine.state.history.ignored["fault on a node that the rank has left"] == 1


def test_processes_of_a_node_that_fail_together_are_one_failure_and_one_attempt() -> None:
    """Each end is reported for itself; a process that was started again and fails again is another failure."""
    cluster = running(failures=2)
    cluster.feed(cluster.exited(0), cluster.exited(1))
    assert failures(cluster) == {"node0": 1}
    cluster.feed(cluster.exited(1))
    assert failures(cluster) == {"node0": 2}
    cluster.recover(1)
    assert len(cluster.machine.incidents) == 1


def test_failures_that_are_older_than_the_window_are_forgotten() -> None:
    cluster = running(failures=1, window_s=100.0)
    cluster.feed(cluster.exited(0))
    cluster.recover(1)
    cluster.now += 100
    assert failures(cluster) == {}
    cluster.feed(cluster.exited(0))
    assert cluster.machine.incidents[-1].rung is Rung.RECOVER_IN_PLACE


def test_a_window_of_zero_counts_over_the_whole_job() -> None:
    cluster = running(failures=1, window_s=0.0)
    cluster.feed(cluster.exited(0))
    cluster.recover(1)
    cluster.now += 1e6
    cluster.feed(cluster.exited(0))
    decision = cluster.machine.incidents[-1].decisions[-1]
    assert decision.rung is Rung.RECOVER
    assert "node node0 has had 2 failures in this job, node.failures is 1" in decision.reason


def test_without_another_node_to_go_to_a_node_is_used_on() -> None:
    """To restart the world on the same nodes would mend nothing."""
    cluster = running(failures=1, spares=0)
    for step in (1, 2, 3):
        cluster.feed(cluster.exited(0))
        assert cluster.machine.incidents[-1].rung is Rung.RECOVER_IN_PLACE
        cluster.recover(step)


def test_without_a_spare_the_platform_replaces_the_node_that_fails_too_often() -> None:
    cluster = running(failures=1, spares=0, creates=True)
    cluster.feed(cluster.exited(0))
    cluster.recover(1)
    cluster.feed(cluster.exited(0))
    decision = cluster.machine.incidents[-1].decisions[-1]
    assert decision.rung is Rung.RECOVER
    assert "to 1 node that the platform brings (node node0 has had 2 failures" in decision.reason
    assert cluster.machine.state.world.nodes["node0"].state is NodeState.ISOLATED


def test_a_ladder_that_cannot_leave_a_node_takes_no_notice_of_the_count() -> None:
    policy = Policy(ladder=(RungPolicy(Rung.RECOVER_IN_PLACE), RungPolicy(Rung.STOP)), node=NodePolicy(1))
    cluster = FakeCluster(job(), policy)
    cluster.start()
    for step in (1, 2, 3):
        cluster.feed(cluster.exited(0))
        assert cluster.machine.incidents[-1].rung is Rung.RECOVER_IN_PLACE
        cluster.recover(step)


def test_the_check_names_budgets_that_the_count_makes_unreachable() -> None:
    ladder = (RungPolicy(Rung.RECOVER_IN_PLACE, budget=Budget(per_node=9)), *LADDER[1:])
    words = "ladder[0].budget.per_node (9) can never be reached: node.failures is 6"
    assert any(words in note for note in advice(Policy(ladder=ladder)))
    assert not any(words in note for note in advice(Policy(ladder=ladder, node=NodePolicy(None))))


def test_a_failure_count_of_others_bars_nobody() -> None:
    worn = tuple(NodeFailure("b", 999.0) for _ in range(9))
    facts = msgspec.structs.replace(facts_of(fault(FaultKind.EXIT, 0)), node_failures=worn)
    assert Ladder(Policy()).decide(facts).rung is Rung.RECOVER_IN_PLACE


def test_a_node_that_was_lost_too_often_is_no_spare_when_it_returns() -> None:
    """Its failures are its own; another node has started from zero in its place."""
    cluster = running(failures=1)
    for step in (1, 2):
        cluster.feed(cluster.exited(0))
        cluster.recover(step)
    cluster.feed(NodeLost("node0", "silent", cluster.now))
    cluster.feed(cluster.node("node0"))
    (status,) = [node for node in cluster.machine.status(cluster.now).nodes if node.node == "node0"]
    assert status.state == "isolated"
    assert status.note == "node node0 has had 2 failures within 100 s, node.failures is 1"


def test_a_node_that_failed_too_often_is_no_spare_because_a_fault_of_it_is_over() -> None:
    """An operator may release it; it is a spare then."""
    cluster = running(failures=1)
    for step in (1, 2):
        cluster.feed(cluster.exited(0))
        cluster.recover(step)
    cluster.feed(NodeLost("node0", "silent", cluster.now), cluster.node("node0"))
    cluster.feed(cluster.unwell("node0"), cluster.unwell("node0", Assertion.RECOVER))
    (status,) = [node for node in cluster.machine.status(cluster.now).nodes if node.node == "node0"]
    assert (status.state, status.note) == (
        "isolated",
        "node node0 has had 2 failures within 100 s, node.failures is 1",
    )
    ask(cluster, ReleaseNode("node0"))
    assert "node0" in cluster.machine.state.world.spares()


def test_a_world_of_nodes_with_eight_ranks_survives_that_all_processes_of_a_node_end_one_by_one() -> None:
    """They are one attempt, however many reports it takes."""
    cluster = FakeCluster(job(nodes=2, ranks_per_node=8, spares=0))
    cluster.start()
    for rank in range(8):
        bodies = cluster.feed(cluster.exited(rank))
        assert [body.rank for body in only(bodies, StartProcess)] == [rank]
    (incident,) = cluster.machine.incidents
    assert {decision.rung for decision in incident.decisions} == {Rung.RECOVER_IN_PLACE}
    budgets = {use.name: use.used for use in cluster.machine.status(cluster.now).budgets}
    assert budgets["recover_in_place per job"] == budgets["recover_in_place per node"] == 1
    assert budgets["recover_in_place per rank"] == 1
    cluster.recover(3)


def test_newcomers_that_never_join_are_another_attempt_each_time() -> None:
    """What is widened without end would never end."""
    ladder = (RungPolicy(Rung.RECOVER_IN_PLACE, attempts=2), RungPolicy(Rung.RECOVER, attempts=1), *LADDER[2:])
    cluster = FakeCluster(job(), Policy(ladder=ladder)).start()
    cluster.feed(cluster.exited(0))
    for rank in (1, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[0]))
    for _ in range(3):
        cluster.now += 61
        cluster.feed(DeadlinePassed())
    rungs = [decision.rung for decision in cluster.machine.incidents[0].decisions]
    assert rungs == [Rung.RECOVER_IN_PLACE, Rung.RECOVER_IN_PLACE, Rung.RECOVER, Rung.RESCHEDULE_POD]
