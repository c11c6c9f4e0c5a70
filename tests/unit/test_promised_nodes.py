"""Ranks whose node is gone wait for one that the platform brings, and the others are parked, not restarted."""

import pytest

from midstep.controller.recovery.events import ControllerStarted, Send
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Policy
from midstep.protocol.messages import CreateNode, NodeLost, NodeRefused, Quiesce, StartProcess
from midstep.protocol.types import Rung
from midstep.testing.fake_cluster import FakeCluster, job, only

LIMITS = Policy().deadlines


@pytest.fixture
def lost() -> FakeCluster:
    """Node1 is lost, and the platform asked for another."""
    cluster = FakeCluster(job(spares=0), Policy(save_before_reschedule=False), creates=True).start()
    asked = cluster.feed(NodeLost("node1", "gone", cluster.now))
    assert [created.node for created in only(asked, CreateNode)] == ["node2"]
    assert [order.rank for order in only(asked, Quiesce)] == [0, 1]
    assert only(asked, StartProcess) == []
    return cluster


def rungs(cluster: FakeCluster) -> list[Rung]:
    """What was decided in the incident."""
    return [decision.rung for decision in cluster.machine.incidents[-1].decisions]


def test_they_start_on_the_node_when_it_comes_and_the_others_keep_their_processes(lost: FakeCluster) -> None:
    lost.feed(*(lost.quiesced(rank, 5, peers=range(4)) for rank in (0, 1)))
    lost.expect(Phase.QUIESCING)
    started = only(lost.feed(lost.node("node2")), StartProcess)
    assert [start.rank for start in started] == [2, 3]
    assert lost.holder(2).node == lost.holder(3).node == "node2"
    lost.feed(*(lost.joined(rank, own=5) for rank in (2, 3)))
    lost.pass_barrier_two(5)
    incident = lost.machine.incidents[0]
    assert (incident.rung, incident.replaced, incident.steps_lost) == (Rung.RECOVER, (2, 3), 0)


def test_any_node_will_do_also_the_lost_one_when_it_is_back(lost: FakeCluster) -> None:
    started = only(lost.feed(lost.node("node1")), StartProcess)
    assert [(start.rank, start.incarnation) for start in started] == [(2, 2), (3, 2)]
    assert lost.holder(2).node == "node1"


def test_nobody_is_late_for_a_start_before_there_is_a_node_for_it(lost: FakeCluster) -> None:
    """The time of a start begins when the node has come, and the wait for it has its own end."""
    lost.feed(*(lost.quiesced(rank, 5, peers=range(4)) for rank in (0, 1)))
    began_s = lost.now
    lost.overdue()  # all have quiesced
    lost.expect(Phase.QUIESCING)
    assert rungs(lost) == [Rung.RECOVER]
    assert lost.machine.next_deadline() == pytest.approx(began_s + LIMITS.nodes_s, abs=0.1)
    lost.feed(lost.node("node2"))
    assert lost.machine.next_deadline() == pytest.approx(lost.now + LIMITS.start_s)


def test_when_no_node_comes_the_next_rung_is_taken(lost: FakeCluster) -> None:
    lost.feed(*(lost.quiesced(rank, 5, peers=range(4)) for rank in (0, 1)))
    while lost.machine.phase is Phase.QUIESCING:
        lost.overdue()
    assert rungs(lost) == [Rung.RECOVER, Rung.RESCHEDULE_POD]
    assert "too few nodes came within 270 s" in lost.machine.incidents[0].decisions[1].skipped[-1].reason


def test_a_platform_that_refuses_is_not_waited_for(lost: FakeCluster) -> None:
    lost.feed(NodeRefused("node2", "no more machines"))
    assert rungs(lost) == [Rung.RECOVER, Rung.RESCHEDULE_POD]


def test_a_promised_node_that_ends_before_it_has_joined_is_asked_for_again(lost: FakeCluster) -> None:
    """Some times, and then the rung has failed."""
    asked = "node2"
    for _ in range(10):
        (created,) = only(lost.feed(NodeLost(asked, "its agent ended", lost.now)), CreateNode)
        asked = created.node
    lost.feed(NodeLost(asked, "its agent ended", lost.now))
    assert rungs(lost) == [Rung.RECOVER, Rung.RESCHEDULE_POD]


def test_a_second_fault_is_part_of_the_same_wait(lost: FakeCluster) -> None:
    """Its rank is started where it is, and no second node is asked for."""
    bodies = lost.feed(lost.exited(1))
    assert [start.rank for start in only(bodies, StartProcess)] == [1]
    assert only(bodies, CreateNode) == []
    started = only(lost.feed(lost.node("node2")), StartProcess)
    assert [start.rank for start in started] == [2, 3]


def test_a_controller_that_takes_over_waits_on(lost: FakeCluster) -> None:
    """It starts nothing where no node is, and asks the platform once more."""
    bodies = lost.feed(ControllerStarted(term=2))
    assert only(bodies, StartProcess) == []
    assert only(bodies, CreateNode) == [CreateNode("node2")]


def test_without_a_platform_that_creates_nodes_nobody_waits() -> None:
    cluster = FakeCluster(job(spares=0)).start()
    cluster.feed(NodeLost("node1", "gone", cluster.now))
    assert rungs(cluster) == [Rung.STOP]


def test_a_node_that_says_itself_that_it_leaves_gets_no_process_any_more() -> None:
    """Its ranks start elsewhere at once; that their processes end there is no further fault."""
    cluster = FakeCluster().start()
    ends = [cluster.exited(rank) for rank in (2, 3)]
    started = only(cluster.feed(NodeLost("node1", "it leaves: SIGTERM", cluster.now)), StartProcess)
    assert [start.rank for start in started] == [2, 3]
    assert cluster.feed(*ends) == []
    receivers = [action.receiver for action in cluster.log if isinstance(action, Send)]
    assert rungs(cluster) == [Rung.RECOVER]
    assert receivers.count("node/node1") == 3  # the welcome and its two first processes
