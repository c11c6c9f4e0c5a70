"""Spares build processes ahead for ranks of nodes in use, and the ranks of a lost node move to where theirs are."""

from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import ControllerStarted, Log, Send
from midstep.controller.recovery.spares import cover
from midstep.policies.schema import Policy, StandbyPolicy, default_policy
from midstep.protocol.messages import BuildAhead, NodeLost, ProcessesPrepared, StartProcess
from midstep.protocol.reports import PreparedProcesses
from midstep.protocol.types import FaultKind, FaultLevel, JobSettings, StandbyDepth
from midstep.testing.fake_cluster import FakeCluster, job, only

BUILT = JobSettings(standby_depth=StandbyDepth.BUILT)


def policy(nodes_per_spare: int = 1) -> Policy:
    """Build ahead for so many nodes."""
    standby = StandbyPolicy(depth=StandbyDepth.BUILT, nodes_per_spare=nodes_per_spare)
    return msgspec.structs.replace(default_policy(), standby=standby)


def running(nodes: int = 3, spares: int = 1, nodes_per_spare: int = 1) -> FakeCluster:
    """A running job of two ranks a node."""
    spec = msgspec.structs.replace(job(nodes=nodes, spares=spares), settings=BUILT)
    return FakeCluster(spec, policy(nodes_per_spare)).start()


def orders(cluster: FakeCluster, since: int = 0) -> dict[str, tuple[int, ...]]:
    """The last order of each node to build ahead: the ranks."""
    return {
        action.receiver.removeprefix("node/"): tuple(start.rank for start in action.body.starts)
        for action in cluster.log[since:]
        if isinstance(action, Send) and isinstance(action.body, BuildAhead)
    }


def prepared(node: str, *ranks: int, took_s: float = 0.5) -> ProcessesPrepared:
    """A node has built processes for these ranks."""
    return ProcessesPrepared(node, PreparedProcesses(StandbyDepth.BUILT, ranks, took_s, 40_000_000))


def says(cluster: FakeCluster) -> list[str]:
    """What the controller has said in its log."""
    return [action.text for action in cluster.log if isinstance(action, Log)]


def started_on(bodies: list[Any], cluster: FakeCluster) -> set[str]:
    """The nodes on which the ranks are that were started."""
    return {cluster.holder(start.rank).node for start in only(bodies, StartProcess)}


# --- which spare builds for which nodes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spares", "failures", "most", "expected"),
    [
        ({"s": ()}, {}, 1, {"s": ("a",)}),
        ({"s": ()}, {"b": 2, "c": 1}, 1, {"s": ("b",)}),
        ({"s": ("c",)}, {"b": 2}, 1, {"s": ("c",)}),
        ({"s": ("gone",)}, {}, 1, {"s": ("a",)}),
        ({"s": (), "t": ()}, {}, 1, {"s": ("a",), "t": ("b",)}),
        ({"s": (), "t": ("a",)}, {}, 1, {"s": ("b",), "t": ("a",)}),
        ({"s": (), "t": ()}, {}, 2, {"s": ("a", "c"), "t": ("b",)}),
        ({"s": ("a", "b")}, {}, 1, {"s": ("a",)}),
        ({"s": ()}, {}, 1_000_000_000, {"s": ("a", "b", "c")}),
        ({"s": ()}, {}, 0, {}),
        ({}, {}, 1, {}),
    ],
)
def test_a_spare_keeps_what_it_builds_and_nodes_that_fail_often_come_first(
    spares: dict[str, tuple[str, ...]], failures: dict[str, int], most: int, expected: dict[str, tuple[str, ...]]
) -> None:
    assert cover(["a", "b", "c"], spares, failures, most) == expected


# --- orders -----------------------------------------------------------------------------------------------------------


def test_a_spare_builds_when_the_job_trains() -> None:
    """As each rank would be started there: as a newcomer of the present world."""
    cluster = running()
    (order,) = [a.body for a in cluster.log if isinstance(a, Send) and isinstance(a.body, BuildAhead)]
    assert isinstance(order, BuildAhead)
    assert [(start.rank, start.local_rank, start.group_rank) for start in order.starts] == [(0, 0, 0), (1, 1, 0)]
    assert {(start.world_size, start.nodes) for start in order.starts} == {(6, 3)}
    assert orders(cluster) == {"node3": (0, 1)}


@pytest.mark.parametrize(
    "settings", [JobSettings(), msgspec.structs.replace(BUILT, standby_depth=StandbyDepth.IMPORTED)]
)
def test_nothing_is_built_unless_the_policy_says_so(settings: JobSettings) -> None:
    spec = msgspec.structs.replace(job(), settings=settings)
    assert orders(FakeCluster(spec, policy()).start()) == {}
    assert orders(running(nodes_per_spare=0)) == {}


def test_a_spare_that_comes_later_builds_for_a_node_that_has_none() -> None:
    cluster = running()
    cluster.feed(cluster.node("node9"))
    assert orders(cluster) == {"node3": (0, 1), "node9": (2, 3)}


def test_an_agent_that_is_there_again_is_ordered_again() -> None:
    """It may be another process of the same name, which has built nothing."""
    cluster = running()
    cluster.feed(prepared("node3", 0, 1))
    before = len(cluster.log)
    cluster.feed(cluster.node("node3"))
    assert orders(cluster, before) == {"node3": (0, 1)}
    assert cluster.machine.state.world.nodes["node3"].prepared == {}


def test_a_controller_that_takes_over_orders_it_again() -> None:
    cluster = running()
    before = len(cluster.log)
    cluster.feed(ControllerStarted(term=2))
    assert orders(cluster, before) == {"node0": (), "node1": (), "node2": (), "node3": (0, 1)}


def test_after_a_restart_of_the_world_it_is_built_in_another_environment() -> None:
    """TORCHELASTIC_RESTART_COUNT is another one."""
    cluster = running()
    before = len(cluster.log)
    cluster.machine.state.accounts.restarts += 1
    cluster.feed(prepared("node3", 0, 1))
    assert orders(cluster, before) == {"node3": (0, 1)}
    assert cluster.machine.state.world.nodes["node3"].prepared == {}


def test_a_spare_that_is_not_fit_builds_nothing() -> None:
    cluster = running()
    before = len(cluster.log)
    cluster.feed(cluster.fault(None, FaultKind.DEVICE, node="node3", level=FaultLevel.SEPARATE_NPU))
    assert cluster.machine.state.world.nodes["node3"].state != "spare"
    assert orders(cluster, before) == {"node3": ()}


# --- the ladder -------------------------------------------------------------------------------------------------------


def test_the_ranks_of_a_lost_node_move_to_the_spare_that_has_built_them() -> None:
    """Also past one that has waited longer; and the report says so."""
    cluster = running(spares=2)
    assert orders(cluster) == {"node3": (0, 1), "node4": (2, 3)}
    cluster.feed(prepared("node3", 0, 1), prepared("node4", 2, 3))
    bodies = cluster.feed(NodeLost("node1", "gone", cluster.now))
    assert started_on(bodies, cluster) == {"node4"}
    (incident,) = cluster.machine.incidents[-1:]
    assert "to spare node node4, with ranks 2, 3 built ahead there (" in incident.decisions[-1].reason


def test_a_spare_that_has_built_nothing_of_it_is_taken_in_its_turn() -> None:
    cluster = running(spares=2)
    cluster.feed(prepared("node3", 0, 1), prepared("node4", 2, 3))
    bodies = cluster.feed(NodeLost("node2", "gone", cluster.now))
    assert started_on(bodies, cluster) == {"node3"}
    assert "built ahead" not in cluster.machine.incidents[-1].decisions[-1].reason


def test_of_two_lost_nodes_each_goes_where_its_ranks_are_built() -> None:
    """The first to be decided does not take the other one's."""
    cluster = running(nodes=4, spares=2)
    cluster.feed(prepared("node4", 0, 1), prepared("node5", 2, 3))
    cluster.feed(NodeLost("node1", "gone", cluster.now), NodeLost("node0", "gone", cluster.now))
    assert [cluster.holder(rank).node for rank in range(4)] == ["node4", "node4", "node5", "node5"]


def test_what_one_spare_has_built_for_two_nodes_serves_one_of_them() -> None:
    cluster = running(nodes=3, spares=2, nodes_per_spare=3)
    cluster.feed(prepared("node3", 0, 1, 4, 5), prepared("node4", 2, 3))
    cluster.feed(NodeLost("node0", "gone", cluster.now), NodeLost("node2", "gone", cluster.now))
    assert {cluster.holder(rank).node for rank in (0, 1)} == {"node3"}
    assert {cluster.holder(rank).node for rank in (4, 5)} == {"node4"}


def test_the_next_spare_builds_when_the_job_trains_again() -> None:
    """And the node that was one builds for none any more but its own ranks."""
    cluster = running(spares=2)
    cluster.feed(prepared("node3", 0, 1), prepared("node4", 2, 3))
    before = len(cluster.log)
    cluster.feed(NodeLost("node1", "gone", cluster.now))
    assert orders(cluster, before) == {}
    cluster.recover(3)
    assert orders(cluster, before) == {"node4": ()}
    assert cluster.machine.state.world.nodes["node3"].ahead.ranks == (0, 1)


def test_ranks_that_are_moved_before_anything_breaks_go_there_as_well() -> None:
    """Their early processes are those that are built."""
    cluster = running(spares=2)
    cluster.feed(prepared("node3", 0, 1), prepared("node4", 2, 3))
    bodies = cluster.feed(cluster.unwell("node1"))
    assert [(start.rank, start.early) for start in only(bodies, StartProcess)] == [(2, True), (3, True)]
    plan = cluster.machine.state.planned.current
    assert plan is not None
    assert plan.spare == "node4"


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_what_each_depth_costs_is_said_once_and_of_each_spare() -> None:
    cluster = running(spares=2)
    imported = PreparedProcesses(StandbyDepth.IMPORTED, (), 1.34, 95_000_000)
    cluster.feed(*(ProcessesPrepared(f"node{number}", imported) for number in range(5)))
    cluster.feed(prepared("node0", 0, 1), prepared("node1", 2, 3), prepared("node3", 0, 1), prepared("node4", 2))
    assert [text for text in says(cluster) if "MB" in text] == [
        "node0: the modules of the next process are imported: 1.34 s, 95 MB of memory",
        "node0: the next processes of ranks 0, 1 are built ahead: 0.50 s each at most, 40 MB of memory in all",
        "node3: the next processes of ranks 0, 1 are built ahead: 0.50 s each at most, 40 MB of memory in all",
        "node4: the next process of rank 2 is built ahead: 0.50 s, 40 MB of memory",
    ]
    status = cluster.machine.status(cluster.now)
    assert [len(node.prepared) for node in status.nodes] == [2, 2, 1, 2, 2]


def test_what_a_node_says_that_is_not_there_is_counted() -> None:
    cluster = running()
    cluster.feed(prepared("elsewhere", 0))
    assert cluster.machine.status(cluster.now).refused["processes that are prepared on a node that is not there"] == 1
