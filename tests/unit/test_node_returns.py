"""A node that was given up for lost is heard again: what runs there is stopped, and it can be used once more."""

import msgspec

from midstep.controller.liveness import Liveness
from midstep.controller.recovery.events import ControllerStarted, NodeReturned, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import HeartbeatPolicy, Policy
from midstep.protocol.messages import (
    DeleteNode,
    EndJob,
    FaultReported,
    IntroduceNode,
    NodeEnrolled,
    NodeGoing,
    NodeJoined,
    NodeLost,
    StartProcess,
    StopProcess,
)
from midstep.protocol.types import FaultKind, FaultLevel, FaultReport, Rung, RunningProcess, StoreEndpoint
from midstep.testing.fake_cluster import FakeCluster, job, only


def running(**changes: int) -> FakeCluster:
    """Two nodes of two ranks, and a spare."""
    cluster = FakeCluster(job(**changes))
    cluster.start()
    return cluster


def introduced(cluster: FakeCluster, name: str, *processes: tuple[int, int]) -> NodeJoined:
    """The answer of an agent: (rank, incarnation) of each process that it still has."""
    running = tuple(RunningProcess(rank, 100 + rank, incarnation, 1) for rank, incarnation in processes)
    return NodeJoined(name, name, StoreEndpoint("127.0.0.1", 1), running)


def state_of(cluster: FakeCluster, name: str) -> str:
    """What the node is to the job."""
    return cluster.machine.state.world.nodes[name].state.value


def lose_and_recover(cluster: FakeCluster, name: str = "node1") -> None:
    """The node goes silent; its ranks move to the spare."""
    cluster.feed(NodeLost(name, "no word for 3.0 s", cluster.now))
    cluster.recover(5)


def test_a_node_that_is_heard_again_is_asked_what_runs_there() -> None:
    cluster = running()
    lose_and_recover(cluster)
    assert cluster.feed(NodeReturned("node1")) == [IntroduceNode()]
    assert cluster.feed(NodeReturned("node0")) == []
    assert cluster.feed(NodeReturned("nobody")) == []


def test_its_old_processes_are_stopped_and_it_is_a_spare_again() -> None:
    cluster = running()
    lose_and_recover(cluster)
    bodies = cluster.feed(introduced(cluster, "node1", (2, 1), (3, 1)))
    assert [(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)] == [(2, 1), (3, 1)]
    assert state_of(cluster, "node1") == "spare"
    cluster.expect(Phase.RUNNING)
    cluster.feed(NodeLost("node0", "gone", cluster.now))
    assert cluster.machine.incidents[-1].rung is Rung.RECOVER
    assert [cluster.holder(rank).node for rank in (0, 1)] == ["node1", "node1"]


def test_a_node_that_was_to_go_is_used_again_with_another_agent() -> None:
    """As of a pod that was deleted and is made again under its name; the same agent that is heard again goes still."""
    cluster = running()
    cluster.feed(NodeGoing("node1", "its agent received SIGTERM", 24.0))
    lose_and_recover(cluster)
    cluster.feed(NodeReturned("node1"), introduced(cluster, "node1"))
    assert state_of(cluster, "node1") == "unfit"
    cluster.feed(NodeLost("node1", "no word for 3.0 s", cluster.now))
    cluster.feed(NodeEnrolled("node1", 2, "k" * 40, "node1"), NodeReturned("node1"), introduced(cluster, "node1"))
    assert state_of(cluster, "node1") == "spare"
    assert not cluster.machine.status(cluster.now).faults


def test_a_node_with_a_standing_fault_returns_as_unfit() -> None:
    cluster = running()
    lose_and_recover(cluster)
    fault = FaultReport(FaultKind.NODE, cluster.now, "detector", "", node="node1", level=FaultLevel.SEPARATE_NPU)
    cluster.feed(FaultReported(fault))
    cluster.feed(introduced(cluster, "node1"))
    assert state_of(cluster, "node1") == "unfit"


def test_a_node_that_was_given_back_is_not_used_again_but_freed() -> None:
    """The platform is about to end it."""
    cluster = FakeCluster(job(nodes=1, spares=1), Policy(save_before_reschedule=False), creates=True)
    cluster.start()
    fault = cluster.fault(0, FaultKind.DEVICE).report
    cluster.feed(FaultReported(msgspec.structs.replace(fault, level=FaultLevel.SEPARATE_NPU)))
    given_back = [name for name, node in cluster.machine.state.world.nodes.items() if node.given_back]
    assert given_back == ["node0"]
    bodies = cluster.feed(introduced(cluster, "node0", (0, 1)))
    assert [stop.rank for stop in only(bodies, StopProcess)] == [0]
    assert state_of(cluster, "node0") != "spare"


def test_a_node_that_held_the_whole_world_does_not_train_on_alone() -> None:
    """Nobody else breaks its collectives. Its processes are the last that the job knew, and are stopped likewise."""
    cluster = FakeCluster(job(nodes=1, spares=0), creates=True)
    cluster.start()
    cluster.feed(NodeLost("node0", "no word for 3.0 s", cluster.now))
    cluster.expect(Phase.WAITING)
    bodies = cluster.feed(introduced(cluster, "node0", (0, 1), (1, 1)))
    assert [stop.rank for stop in only(bodies, StopProcess)] == [0, 1]
    if cluster.machine.phase is Phase.STARTING:  # the returned node may be what the job waits for
        assert [start.incarnation for start in only(bodies, StartProcess)] == [2, 2]


def test_a_node_that_found_its_controller_again_keeps_its_processes() -> None:
    """It was never given up."""
    cluster = running()
    assert only(cluster.feed(introduced(cluster, "node1", (2, 1), (3, 1))), StopProcess) == []
    assert state_of(cluster, "node1") == "active"


def test_a_return_is_told_once_in_a_while_until_the_node_has_joined() -> None:
    """Words that were still on their way when it was given up are no return."""
    liveness = Liveness(HeartbeatPolicy())
    joined = NodeJoined("node0", "node0", StoreEndpoint("h", 1))
    liveness.learn(joined, 0.0)
    assert not liveness.hear("node0", 1.0)
    liveness.learn(NodeLost("node0", "silent", 10.0), 10.0)
    assert not liveness.hear("node0", 10.1)
    assert liveness.hear("node0", 20.0)
    assert not liveness.hear("node0", 20.5)
    assert liveness.hear("node0", 23.1)
    liveness.learn(joined, 23.2)
    assert not liveness.hear("node0", 40.0)


def test_nodes_that_are_to_end_are_not_waited_for() -> None:
    liveness = Liveness(HeartbeatPolicy())
    liveness.learn(NodeLost("node0", "silent", 10.0), 10.0)
    liveness.ordered("platform", DeleteNode("node0"))
    assert not liveness.hear("node0", 40.0)


def test_a_restarted_controller_gives_nodes_back_once_more() -> None:
    """Between the record and the action the first one may have died; the platform ends each node once."""
    cluster = FakeCluster(job(nodes=1, spares=1), Policy(save_before_reschedule=False), creates=True)
    cluster.start()
    assert only(cluster.feed(ControllerStarted(term=2)), DeleteNode) == []
    fault = cluster.fault(0, FaultKind.DEVICE).report
    separated = msgspec.structs.replace(fault, level=FaultLevel.SEPARATE_NPU)
    assert only(cluster.feed(FaultReported(separated)), DeleteNode) == [DeleteNode("node0")]
    assert only(cluster.feed(ControllerStarted(term=3)), DeleteNode) == [DeleteNode("node0")]
    cluster.feed(StopRequested("enough"), StopRequested("enough"))
    assert cluster.machine.phase is Phase.ENDED
    assert only(cluster.feed(ControllerStarted(term=4)), DeleteNode) == [DeleteNode("node0")], "after the job, too"


def test_a_node_that_comes_back_when_the_job_is_over_is_told_so() -> None:
    """Its processes would live on, as no other order ends them."""
    cluster = running(spares=0)
    cluster.feed(NodeLost("node1", "no word for 3.0 s", cluster.now), StopRequested("enough"))
    cluster.feed(StopRequested("enough", insist=True))
    cluster.expect(Phase.ENDED)
    (order,) = only(cluster.feed(introduced(cluster, "node1", (2, 1), (3, 1))), EndJob)
    assert cluster.machine.state.result is not None
    assert order == EndJob(cluster.machine.state.result.exit_code, cluster.machine.state.result.reason)
