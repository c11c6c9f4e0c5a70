"""A slow node, or one with slow links, is shown, or drained, a few times at most."""

from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.world import NodeState
from midstep.policies.schema import Policy, ScalePolicy, SlowAction, SlowPolicy, SubHealthAction
from midstep.protocol.messages import FaultReported, StartProcess
from midstep.protocol.types import CONTROLLER, Assertion, FaultKind, FaultLevel
from midstep.testing.fake_cluster import STEP, FakeCluster, job, only

BOUNDARY = STEP + 1 + 10  # a second ahead
DRAINS = SlowPolicy(then=SlowAction.DRAIN, nodes=1, window_s=100.0)


def running(
    slow: SlowPolicy = DRAINS, spares: int = 2, sub_health: SubHealthAction = SubHealthAction.DRAIN
) -> FakeCluster:
    """Four ranks on two nodes."""
    cluster = FakeCluster(job(spares=spares), Policy(slow=slow, sub_health=sub_health))
    cluster.start()
    return cluster


def slow(
    cluster: FakeCluster, node: str = "node1", kind: FaultKind = FaultKind.SLOW, assertion: Assertion = Assertion.OCCUR
) -> FaultReported:
    """The controller finds that a node is slow."""
    report = cluster.fault(
        None, kind, node=node, fault_id=f"{kind} {node}", assertion=assertion, detail="rank 3 slow"
    ).report
    return FaultReported(msgspec.structs.replace(report, seen_by=CONTROLLER))


def level(cluster: FakeCluster) -> FaultLevel:
    """The level of the one fault that stands."""
    (fault,) = cluster.machine.status(cluster.now).faults
    return fault.report.level


def test_by_default_a_slow_node_is_shown_and_stays() -> None:
    cluster = running(SlowPolicy())
    assert cluster.feed(slow(cluster)) == []
    assert level(cluster) is FaultLevel.NOT_HANDLE
    cluster.feed(slow(cluster, assertion=Assertion.RECOVER))
    assert cluster.machine.status(cluster.now).faults == ()


@pytest.mark.parametrize("kind", [FaultKind.SLOW, FaultKind.SLOW_LINK])
def test_a_slow_node_is_drained_to_a_spare(kind: FaultKind) -> None:
    """Processes are started there, and no rank is stopped for it."""
    cluster = running()
    bodies = cluster.feed(slow(cluster, kind=kind))
    assert [(body.process.rank if hasattr(body, "process") else body.rank) for body in only(bodies, StartProcess)] == [
        2,
        3,
    ]
    assert level(cluster) is FaultLevel.SUB_HEALTH
    assert cluster.feed(slow(cluster, kind=kind)) == []


def test_no_more_nodes_are_drained_than_the_policy_says() -> None:
    """If it is not the node, the ranks would wander from one to the next."""
    cluster = running()
    cluster.feed(slow(cluster))
    bodies = cluster.feed(slow(cluster, "node0"))
    assert only(bodies, StartProcess) == []
    fault = cluster.machine.status(cluster.now).faults[-1].report
    assert fault.level is FaultLevel.NOT_HANDLE
    assert "it stays, as slow.nodes within 100 s is 1" in fault.detail


def test_drains_are_forgotten_after_the_window() -> None:
    cluster = running()
    cluster.feed(slow(cluster))
    cluster.now += 101.0
    cluster.feed(slow(cluster, "node0"))
    assert cluster.machine.status(cluster.now).faults[-1].report.level is FaultLevel.SUB_HEALTH


def test_a_slow_loader_drains_nothing() -> None:
    """It is slow on another node, too."""
    cluster = running()
    assert cluster.feed(slow(cluster, kind=FaultKind.SLOW_INPUT)) == []
    assert level(cluster) is FaultLevel.NOT_HANDLE


def test_without_a_spare_a_slow_node_stays_in_use() -> None:
    cluster = running(spares=0)
    assert cluster.feed(slow(cluster)) == []
    assert "no spare node" in next(
        each.note for each in cluster.machine.status(cluster.now).nodes if each.node == "node1"
    )


@pytest.mark.parametrize("by", ["detector/x", "rank/1"])
def test_what_others_call_slow_is_a_report_as_any_other(by: str) -> None:
    """They say the level themselves."""
    cluster = running()
    report = msgspec.structs.replace(slow(cluster).report, seen_by=by, level=FaultLevel.NOT_HANDLE)
    assert cluster.feed(FaultReported(report)) == []
    assert level(cluster) is FaultLevel.NOT_HANDLE


# --- in a smaller world -----------------------------------------------------------------------------------------------

SHRINKS = SlowPolicy(then=SlowAction.SHRINK, nodes=1)


def shrinking(spares: int = 0, min_nodes: int = 1, *, creates: bool = False) -> FakeCluster:
    """Four ranks on two nodes, which may be fewer."""
    policy = Policy(slow=SHRINKS, scale=ScalePolicy(min_nodes=min_nodes))
    return FakeCluster(job(spares=spares), policy, creates=creates).start()


def test_without_a_spare_the_world_continues_without_a_slow_node() -> None:
    """All ranks stop between two steps, write a checkpoint, and those of the other node start from it."""
    cluster = shrinking()
    cluster.feed(slow(cluster))
    cluster.feed(cluster.clocks("node0"), cluster.clocks("node1"))
    cluster.feed(*(cluster.quiesced(rank, BOUNDARY) for rank in range(4)))
    assert cluster.machine.state.saving.outstanding.keys() == {0, 1, 2, 3}
    bodies = cluster.feed(*(cluster.saved(rank, BOUNDARY) for rank in range(4)))
    assert [start.rank for start in only(bodies, StartProcess)] == [0, 1]
    state = cluster.machine.state
    assert (state.world.size, state.nodes_needed) == (2, 1)
    assert state.world.nodes["node1"].state is NodeState.ISOLATED


@pytest.mark.parametrize("world", [{"spares": 1}, {"creates": True}, {"min_nodes": 2}])
def test_a_slow_node_is_not_left_by_a_smaller_world_where_another_can_come_or_too_few_would_stay(
    world: dict[str, Any],
) -> None:
    cluster = shrinking(**world)
    cluster.feed(slow(cluster))
    change = cluster.machine.state.planned.current
    assert change is None or not change.restarts
