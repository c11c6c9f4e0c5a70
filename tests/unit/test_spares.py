"""Spares that were used or lost are asked for again: when the job trains, and not for ever."""

import itertools

from midstep.controller.recovery.events import Send
from midstep.controller.recovery.spares import TRIES
from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import CreateNode, NodeLost, NodeRefused
from midstep.testing.fake_cluster import FakeCluster, job, only


def running(spares: int = 1) -> FakeCluster:
    """A running job whose platform creates nodes."""
    return FakeCluster(job(spares=spares), creates=True).start()


def test_a_spare_that_was_used_is_asked_for_when_the_job_trains_again() -> None:
    """In the recovery itself there is more to do."""
    cluster = running()
    assert only(cluster.feed(NodeLost("node1", "gone", cluster.now)), CreateNode) == []
    before = len(cluster.log)
    cluster.recover(3)
    sent = [action.body for action in cluster.log[before:] if isinstance(action, Send)]
    assert only(sent, CreateNode) == [CreateNode("node3")]
    cluster.feed(cluster.node("node3"))
    assert cluster.machine.state.world.nodes["node3"].state == "spare"
    assert cluster.machine.next_deadline() is None


def test_a_spare_that_is_lost_is_asked_for_at_once() -> None:
    cluster = running()
    assert only(cluster.feed(NodeLost("node2", "gone", cluster.now)), CreateNode) == [CreateNode("node3")]


def test_what_a_job_never_had_is_not_asked_for() -> None:
    """Its spares may still be on their way."""
    cluster = FakeCluster(job(spares=1), creates=True)
    cluster.feed(cluster.node("node0"), cluster.node("node1"))
    cluster.overdue()  # the spare is not waited for any longer
    cluster.feed(*(cluster.joined(rank, fresh=True, own=0) for rank in range(4)))
    cluster.pass_barrier_two(0)
    assert cluster.machine.state.world.named(cluster.machine.state.world.nodes["node0"].state.REQUESTED) == []


def test_a_platform_that_has_none_is_asked_less_and_less_often_and_then_no_more() -> None:
    cluster = running()
    created = only(cluster.feed(NodeLost("node2", "gone", cluster.now)), CreateNode)
    times = []
    while created:
        times.append(cluster.now)
        cluster.feed(NodeRefused(created[0].node, "no more machines"))
        created = only(cluster.overdue(), CreateNode)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == TRIES
    assert pauses == sorted(pauses)
    assert cluster.machine.next_deadline() is None
    cluster.expect(Phase.RUNNING)


def test_without_spares_in_the_job_or_a_platform_none_is_asked_for() -> None:
    alone = running(spares=0)
    alone.feed(alone.node("node9"))
    assert alone.feed(NodeLost("node9", "gone", alone.now)) == []
    fixed = FakeCluster().start()
    assert fixed.feed(NodeLost("node2", "gone", fixed.now)) == []
