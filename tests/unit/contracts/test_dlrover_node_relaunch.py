"""DLRover Unified, "Node Relaunch": a node on which too much failed is replaced, once, and its count begins again.

The per-node count is `node.failures`, or the budget `per_node` of a rung; the relaunch is `recover` onto a spare node,
or `reschedule_pod` with a node that the platform creates.
"""

import pytest

from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState
from midstep.protocol.messages import CreateNode, DeleteNode, NodeLost, StartProcess
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, Rung
from midstep.testing.answering_cluster import AnsweringCluster

TWICE = """
ladder:
  - {rung: recover_in_place, budget: {per_node: 2, per_job: null}}
  - {rung: recover, budget: {per_job: 3, window_s: 0}}
  - {rung: stop}
"""
WORN = """
node: {failures: 2}
ladder: [{rung: recover_in_place, budget: {per_job: null}}, {rung: recover}, {rung: reschedule_pod}, {rung: stop}]
"""


def used_up(**more: bool | int) -> AnsweringCluster:
    """A job in which rank 0's node has failed as often as it may."""
    job = AnsweringCluster(TWICE, **more).start()  # type: ignore[arg-type]
    job.kill(0)
    job.kill(1)
    return job


def test_failures_of_all_actors_of_a_node_count_for_the_node() -> None:
    """Two workers failed once each: that is two for their node, and no reason to leave it yet."""
    job = used_up()

    assert [incident.rung for incident in job.incidents] == [Rung.RECOVER_IN_PLACE, Rung.RECOVER_IN_PLACE]
    assert {use.name: use.used for use in job.machine.status(job.now).budgets}["recover_in_place per node"] == 2


def test_node_over_its_limit_is_replaced_exactly_once() -> None:
    """The next failure on it moves everything that is on it, together; the reason names the node and the numbers."""
    job = used_up()

    job.kill(0)

    decision = job.incidents[-1].decisions[-1]
    assert decision.rung is Rung.RECOVER
    assert "per_node of node node0 is spent: 2 of 2" in decision.reason
    assert {process.node for rank, process in job.processes.items() if rank in (0, 1)} == {"node2"}
    assert job.machine.state.world.nodes["node0"].state is NodeState.ISOLATED
    assert len(job.incidents[-1].decisions) == 1


def test_other_actors_of_the_node_restart_with_it_and_that_is_no_failure() -> None:
    """The neighbour's process is ended for the relaunch: its report opens no incident and is counted for nobody."""
    job = used_up()
    neighbour = job.processes[1]
    job.kill(0)
    incidents = len(job.incidents)
    spent = len(job.machine.state.spent)

    job.feed(job.end_of(neighbour, expected=True), job.end_of(neighbour))
    job.settle()

    assert len(job.incidents) == incidents
    assert len(job.machine.state.spent) == spent
    assert job.phase is Phase.RUNNING


def test_per_node_count_is_reset_by_the_relaunch() -> None:
    """On the new node the same ranks may fail as often as on the old one."""
    job = used_up()
    job.kill(0)

    job.kill(0)
    job.kill(1)

    assert [incident.rung for incident in job.incidents[-2:]] == [Rung.RECOVER_IN_PLACE] * 2


def test_report_from_a_removed_node_is_not_counted() -> None:
    """What its agent, its processes or a detector still say of it changes nothing."""
    job = used_up()
    old = job.processes[0]
    job.kill(0)
    incidents, spent = len(job.incidents), len(job.machine.state.spent)
    before = job.pids_now()

    job.feed(job.end_of(old), NodeLost("node0", "switched off", job.now))
    job.suffer(FaultKind.EXCEPTION, 0, incarnation=old.incarnation, node="node0")
    job.settle()

    assert (len(job.incidents), len(job.machine.state.spent)) == (incidents, spent)
    assert job.pids_now() == before
    assert job.phase is Phase.RUNNING


def test_removed_node_that_comes_back_is_not_used() -> None:
    """It was left because too much failed on it: an agent that joins again under its name is no spare."""
    job = used_up()
    job.kill(0)

    job.node_joins("node0")
    job.lose_node("node1")

    assert "node0" not in {process.node for process in job.processes.values()}


def test_without_a_platform_that_relaunches_the_node_is_not_removed() -> None:
    """No spare and nobody who makes nodes: the job goes on with the next rung where it is."""
    policy = TWICE.replace("  - {rung: stop}", "  - {rung: reschedule_pod}\n  - {rung: stop}")
    job = AnsweringCluster(policy, spares=0).start()
    job.checkpoints = (5,)

    for rank in (0, 1, 0):
        job.kill(rank)

    assert job.rungs == [Rung.RESCHEDULE_POD]
    assert job.machine.state.world.nodes["node0"].state is NodeState.ACTIVE
    assert job.commands(DeleteNode) == []
    assert job.phase is Phase.RUNNING


def test_extension_gets_exactly_that_node() -> None:
    """The platform is asked to take away the one broken node and to bring one."""
    policy = "ladder: [{rung: reschedule_pod}, {rung: stop}]"
    job = AnsweringCluster(policy, spares=0, creates_nodes=True).start()
    job.checkpoints = (5,)

    job.lose_node("node1")

    assert [body.node for body in job.commands(DeleteNode)] == ["node1"]
    assert [body.node for body in job.commands(CreateNode)] == ["node2"]
    assert {process.node for process in job.processes.values()} == {"node0", "node2"}


def test_relaunch_that_the_platform_refuses_is_a_failed_rung() -> None:
    """Its reason is kept, the next rung is tried, and the stop names both."""
    policy = "ladder: [{rung: reschedule_pod}, {rung: reschedule_job}, {rung: stop}]"
    job = AnsweringCluster(policy, spares=0, creates_nodes=True, refuses_nodes="no quota").start()

    job.lose_node("node1")

    assert job.rungs == [Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB, Rung.STOP]
    assert "reschedule_pod: failed before in this incident: the platform refused node" in job.outcome.reason


def test_relaunch_timeout_is_a_failed_rung() -> None:
    """A platform that says nothing is waited for until `deadlines.nodes_s`, then the ladder goes on."""
    policy = "ladder: [{rung: reschedule_pod}, {rung: reschedule_job}, {rung: stop}]"
    job = AnsweringCluster(policy, spares=0, creates_nodes=True).start()
    job.mute = lambda body: isinstance(body, CreateNode) and body.node == "node2"
    began_s = job.now

    job.lose_node("node1")
    assert job.phase is Phase.WAITING
    job.wait()

    assert job.now - began_s >= 270
    assert job.rungs == [Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB]
    assert "too few nodes came within 270 s" in job.skipped(Rung.RESCHEDULE_POD)


def test_relaunched_node_that_comes_late_is_taken_all_the_same() -> None:
    """A node that the platform had been given up on is one more place to be."""
    policy = "ladder: [{rung: reschedule_pod}, {rung: reschedule_job}, {rung: stop}]"
    job = AnsweringCluster(policy, spares=0, creates_nodes=True).start()
    job.mute = lambda body: isinstance(body, CreateNode) and body.node == "node2"
    job.lose_node("node1")
    job.wait()
    assert job.phase is Phase.RUNNING

    job.node_joins("node2")
    job.settle()

    assert job.machine.state.world.nodes["node2"].state is NodeState.SPARE


def test_failures_of_both_actors_of_a_dying_node_relaunch_it_once() -> None:
    """Ends of its processes, the loss of the node, and late words of its ranks: one incident, one move."""
    job = AnsweringCluster().start()
    first, second = job.processes[2], job.processes[3]
    job.drop_node("node1")

    job.feed(job.end_of(first), NodeLost("node1", "its agent is gone", job.now), job.end_of(second))
    job.report(FaultKind.EXIT, 3, incarnation=second.incarnation)
    job.settle()

    assert len(job.incidents) == 1
    assert job.phase is Phase.RUNNING
    assert job.rungs[-1] is Rung.RECOVER
    assert {start.rank: start.incarnation for start in job.commands(StartProcess)}[3] == 2


@pytest.mark.parametrize("level", [FaultLevel.SOFTWARE, FaultLevel.SEPARATE_NPU, FaultLevel.NODE])
@pytest.mark.parametrize("name", ["node0", "someone-elses", "node2"])
def test_fault_of_a_machine_without_ranks_is_nobodys_failure(name: str, level: FaultLevel) -> None:
    """A node that was removed, one that the job never had, a spare: nobody is interrupted, nothing is counted."""
    policy = "ladder: [{rung: recover}, {rung: stop}]"
    job = AnsweringCluster(policy, spares=2).start()
    if name == "node0":
        job.device_fault(0, FaultLevel.SEPARATE_NPU)
    incidents, before = len(job.incidents), job.pids_now()

    job.suffer(FaultKind.NODE, node=name if name != "node2" else "node3", level=level)

    assert (len(job.incidents), job.pids_now(), job.phase) == (incidents, before, Phase.RUNNING)


def test_spare_with_a_fault_is_not_relaunched_onto() -> None:
    """The other spare is taken, also where the broken one came first."""
    job = AnsweringCluster("ladder: [{rung: recover}, {rung: stop}]", spares=2).start()
    job.suffer(FaultKind.NODE, node="node2", level=FaultLevel.SEPARATE_NPU, assertion=Assertion.OCCUR, fault_id="f")

    job.lose_node("node0")

    assert {process.node for process in job.processes.values()} == {"node1", "node3"}


def test_node_with_more_failures_than_it_may_have_is_relaunched() -> None:
    """Whatever rung mended them: two were borne, with the third the node's ranks move."""
    job = AnsweringCluster(WORN).start()
    job.kill(0)
    job.kill(1)
    assert job.rungs == [Rung.RECOVER_IN_PLACE]

    job.kill(0)

    assert job.rungs == [Rung.RECOVER]
    assert {process.node for rank, process in job.processes.items() if rank < 2} == {"node2"}
    assert job.machine.state.world.nodes["node0"].state is NodeState.ISOLATED


def test_relaunched_node_counts_from_zero_and_its_restarts_are_no_failures() -> None:
    """Three failures were the old node's; the new one bears two of its own."""
    job = AnsweringCluster(WORN, spares=2).start()
    for rank in (0, 1, 0):
        job.kill(rank)
    assert job.machine.status(job.now).nodes[2].failures == 0

    job.kill(1)
    job.kill(0)

    assert job.rungs == [Rung.RECOVER_IN_PLACE]
    assert job.processes[0].node == "node2"
    job.kill(0)
    assert job.processes[0].node == "node3"


def test_failures_of_a_node_that_come_together_count_once() -> None:
    """Both actors die of one thing: that is one failure of the node."""
    job = AnsweringCluster(WORN).start()
    for _ in range(2):
        processes = [job.vanish(rank) for rank in (0, 1)]
        job.feed(*(job.end_of(process) for process in processes))
        job.settle()

    assert job.machine.status(job.now).nodes[0].failures == 2
    assert job.processes[0].node == "node0"


def test_failures_of_long_ago_do_not_relaunch_a_node() -> None:
    """The count is over a sliding window."""
    job = AnsweringCluster(WORN).start()
    job.kill(0)
    job.kill(1)
    job.now += 3601

    job.kill(0)

    assert job.rungs == [Rung.RECOVER_IN_PLACE]


def test_worn_out_node_that_cannot_be_relaunched_is_used_on() -> None:
    """No spare, and nobody who makes nodes: going on there is better than ending."""
    job = AnsweringCluster(WORN, spares=0).start()
    job.checkpoints = (5,)
    for rank in (0, 1, 0):
        job.kill(rank)

    assert job.phase is Phase.RUNNING
    assert job.processes[0].node == "node0"
