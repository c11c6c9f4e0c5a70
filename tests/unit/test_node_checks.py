"""Nodes are checked before they get ranks: who is checked with whom, and what their figures mean."""

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstep.agent.channel import CheckOrder
from midstep.agent.node_check import measure
from midstep.cli.job_options import asked_for
from midstep.cli.run import command
from midstep.controller.recovery.events import ControllerStarted
from midstep.controller.recovery.fitness import NodeChecks
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState
from midstep.launch.job import policy_of
from midstep.policies.schema import NodeCheckPolicy, Policy
from midstep.protocol.messages import CheckNode, NodeChecked, NodeLost, StartProcess
from midstep.protocol.types import Assertion, JobSettings
from midstep.testing.fake_cluster import FakeCluster, job, only

from .test_draining import BOUNDARY, MOVED, prepare, stopped

WITHIN_S = 30.0
CHECKED = Policy(node_check=NodeCheckPolicy(enabled=True, within_s=WITHIN_S))
GOOD: dict[str, Any] = {"product_s": 0.5, "exchange_s": 0.1}
BROKEN: dict[str, Any] = {"product_s": 0.5, "error": "no word from the other node"}


def pairs(checks: NodeChecks, good: list[str] | None = None) -> list[tuple[str, ...]]:
    """Begin all checks that can begin; return their nodes."""
    begun = []
    while (check := checks.begin(good or [], alone=False)) is not None:
        begun.append(check.nodes)
    return begun


def answer(checks: NodeChecks, **figures: dict[str, Any]) -> dict[str, str]:
    """All nodes of the check that `figures` names answer; return the verdicts."""
    number = next(check.number for check in checks.running if set(figures) <= set(check.nodes))
    verdicts: dict[str, str] = {}
    for name, said in figures.items():
        verdicts |= checks.take(NodeChecked(name, number, **said), WITHIN_S)
    return verdicts


def waiting(*names: str) -> NodeChecks:
    """Nodes that wait for their check."""
    checks = NodeChecks()
    for name in names:
        checks.add(name)
    return checks


def test_nodes_are_checked_in_pairs_and_an_odd_one_with_a_node_that_has_passed() -> None:
    checks = waiting("a", "b", "c")
    assert pairs(checks) == [("a", "b")]
    assert answer(checks, a=GOOD, b=GOOD) == {"a": "", "b": ""}
    assert pairs(checks, ["a", "b"]) == [("c", "a")]
    assert checks.running[0].checked == ("c",)
    assert answer(checks, c=GOOD, a={"exchange_s": 0.1}) == {"c": ""}


def test_a_node_whose_product_is_slow_or_wrong_is_left_with_its_figure() -> None:
    checks = waiting("a", "b", "c", "d")
    assert pairs(checks) == [("a", "b"), ("c", "d")]
    slow = answer(checks, a={"product_s": 41.5, "exchange_s": 0.1}, b=GOOD)
    assert slow == {"a": "a matrix product took 41.5 s, more than 30 s (node_check.within_s)", "b": ""}
    wrong = answer(checks, c=GOOD, d={"exchange_s": 0.1, "error": "a matrix product on the npu is wrong"})
    assert wrong == {"c": "", "d": "a matrix product failed: a matrix product on the npu is wrong"}


def test_of_two_nodes_that_cannot_reach_each_other_the_one_that_reaches_no_other_is_left() -> None:
    checks = waiting("a", "b", "c", "d")
    pairs(checks)
    assert answer(checks, a=BROKEN, b=BROKEN) == {}
    assert answer(checks, c=GOOD, d=GOOD) == {"c": "", "d": ""}
    assert pairs(checks, ["c", "d"]) == [("a", "c"), ("b", "d")]
    assert answer(checks, a=GOOD, c={"exchange_s": 0.1}) == {"a": ""}
    verdicts = answer(checks, b=BROKEN, d={"exchange_s": None, "error": "nobody came"})
    assert verdicts == {"b": "an exchange with d failed: no word from the other node, after one with a had failed"}


def test_a_slow_exchange_is_no_success() -> None:
    checks = waiting("a")
    assert pairs(checks, ["b"]) == [("a", "b")]
    assert answer(checks, a=GOOD | {"exchange_s": 31.0}, b={"exchange_s": 29.0}) == {}
    pairs(checks, ["c"])
    (why,) = answer(checks, a=GOOD | {"exchange_s": 31.0}, c={"exchange_s": 29.0}).values()
    assert why.startswith("an exchange with c took 31.0 s, more than 30 s")


def test_two_nodes_that_are_all_there_is_are_tried_twice_and_then_both_left() -> None:
    checks = waiting("a", "b")
    for _ in range(2):
        assert pairs(checks) == [("a", "b")]
        verdicts = answer(checks, a=BROKEN, b=BROKEN)
    assert set(verdicts) == {"a", "b"}
    assert all(verdicts.values())


def test_a_node_whose_partner_is_lost_or_broken_is_paired_again_without_blame() -> None:
    checks = waiting("a", "b")
    pairs(checks)
    checks.forget("b")
    assert checks.waiting == ["a"]
    checks.add("c")
    pairs(checks)
    assert answer(checks, a=BROKEN, c={"error": "the device is gone"}) == {
        "c": "a matrix product failed: the device is gone"
    }
    assert checks.waiting == ["a"]
    assert not checks.failed_with


def test_a_node_that_fails_before_its_exchange_is_left_at_once_and_its_partner_does_not_wait_for_it() -> None:
    """The partner's own answer, which comes later, is that of a check that is over."""
    checks = waiting("a", "b")
    pairs(checks)
    first = checks.running[0].number
    checks.add("c")
    assert answer(checks, b={"error": "the device is gone"}) == {"b": "a matrix product failed: the device is gone"}
    assert pairs(checks) == [("c", "a")]
    assert checks.take(NodeChecked("a", first, **BROKEN), WITHIN_S) == {}
    assert answer(checks, a=GOOD, c=GOOD) == {"a": "", "c": ""}
    assert not checks.failed_with


def test_a_node_whose_exchange_fails_first_says_nothing_of_its_partner_yet() -> None:
    checks = waiting("a", "b")
    pairs(checks)
    assert answer(checks, a=BROKEN) == {}
    assert answer(checks, b={"error": "the device is gone"}) == {"b": "a matrix product failed: the device is gone"}
    assert checks.waiting == ["a"]


# --- in a job -------------------------------------------------------------------------------------------------------


def figures(cluster: FakeCluster, orders: list[Any], **changes: dict[str, Any]) -> list[Any]:
    """Answer all orders to check a node, well unless `changes` says otherwise; return what is ordered then."""
    nodes = {name: check for check in cluster.machine.state.checks.running for name in check.nodes}
    assert len(only(orders, CheckNode)) == len(nodes)
    return cluster.feed(*(NodeChecked(name, check.number, **changes.get(name, GOOD)) for name, check in nodes.items()))


def state_of(cluster: FakeCluster, node: str) -> NodeState:
    return cluster.machine.state.world.nodes[node].state


def test_a_job_starts_when_enough_nodes_have_passed_their_check() -> None:
    cluster = FakeCluster(job(nodes=2, spares=0), CHECKED)
    orders = cluster.feed(cluster.node("node0"), cluster.node("node1"))
    assert only(orders, StartProcess) == []
    assert [(order.number, order.computes) for order in only(orders, CheckNode)] == [(0, True), (1, True)]
    assert len({order.store for order in only(orders, CheckNode)}) == 1
    cluster.expect(Phase.WAITING)
    assert len(only(figures(cluster, orders), StartProcess)) == 4


def test_a_node_that_fails_is_left_with_the_figure_and_the_next_one_takes_its_place() -> None:
    cluster = FakeCluster(job(nodes=2, spares=0), CHECKED)
    orders = cluster.feed(cluster.node("node0"), cluster.node("node1"))
    figures(cluster, orders, node1={"product_s": 55.0, "exchange_s": 0.1})
    cluster.expect(Phase.WAITING)
    assert state_of(cluster, "node1") is NodeState.ISOLATED
    (node,) = [node for node in cluster.machine.status(cluster.now).nodes if node.node == "node1"]
    assert "a matrix product took 55.0 s, more than 30 s" in node.note
    orders = cluster.feed(cluster.node("node2"))
    assert [order.computes for order in only(orders, CheckNode)] == [True, False]
    assert len(only(figures(cluster, orders, node0={"exchange_s": 0.1}), StartProcess)) == 4


def test_a_node_that_comes_back_is_checked_with_one_in_use_before_it_is_a_spare() -> None:
    cluster = FakeCluster(job(nodes=2, spares=1), CHECKED)
    figures(cluster, cluster.feed(*(cluster.node(f"node{number}") for number in range(2))))
    cluster.feed(NodeLost("node2", "gone", cluster.now))
    orders = cluster.feed(cluster.node("node2"))
    assert state_of(cluster, "node2") is NodeState.UNFIT
    figures(cluster, orders)
    assert state_of(cluster, "node2") is NodeState.SPARE


@pytest.fixture
def drained() -> FakeCluster:
    """A job that trains on two of three nodes, which have passed their check; node1 was drained."""
    cluster = FakeCluster(job(nodes=2, spares=1), CHECKED)
    orders = cluster.feed(*(cluster.node(f"node{number}") for number in range(3)))
    while only(orders, CheckNode):
        orders = figures(cluster, orders)
    ranks = range(cluster.job.world_size)
    cluster.feed(*(cluster.started(rank) for rank in ranks))
    cluster.feed(*(cluster.joined(rank, fresh=True, own=0) for rank in ranks))
    cluster.pass_barrier_two(0)
    prepare(cluster)
    cluster.feed(*(stopped(cluster, rank) for rank in ranks))
    cluster.feed(*(cluster.joined(rank) for rank in MOVED))
    cluster.pass_barrier_two(BOUNDARY)
    assert state_of(cluster, "node1") is NodeState.ISOLATED
    return cluster


def over(cluster: FakeCluster) -> list[Any]:
    """The detector says that the fault of node1 is over; return what is ordered."""
    return cluster.feed(cluster.unwell("node1", Assertion.RECOVER))


def test_a_node_that_was_left_is_checked_again_when_its_fault_is_over(drained: FakeCluster) -> None:
    """It is a spare when it has passed, and not before."""
    orders = over(drained)
    assert [order.computes for order in only(orders, CheckNode)] == [True, False]
    assert state_of(drained, "node1") is NodeState.UNFIT
    figures(drained, orders)
    assert state_of(drained, "node1") is NodeState.SPARE


def test_a_node_that_was_left_stays_so_where_it_fails_the_check_after_its_fault(drained: FakeCluster) -> None:
    """The figure stands beside it, as for a node that comes."""
    figures(drained, over(drained), node1={"product_s": 55.0, "exchange_s": 0.1})
    assert state_of(drained, "node1") is NodeState.ISOLATED
    (node,) = [node for node in drained.machine.status(drained.now).nodes if node.node == "node1"]
    assert "its check has failed: a matrix product took 55.0 s" in node.note


def test_the_next_controller_orders_the_checks_that_have_not_been_answered() -> None:
    cluster = FakeCluster(job(nodes=2, spares=0), CHECKED)
    orders = only(cluster.feed(cluster.node("node0"), cluster.node("node1")), CheckNode)
    cluster.feed(NodeChecked("node0", 1, **GOOD))
    assert only(cluster.feed(ControllerStarted(term=2)), CheckNode) == orders[1:]


def test_a_job_of_one_node_checks_it_alone() -> None:
    cluster = FakeCluster(job(nodes=1, spares=0), CHECKED)
    orders = cluster.feed(cluster.node("node0"))
    assert [order.store for order in only(orders, CheckNode)] == [None]
    assert only(figures(cluster, orders, node0={"product_s": 0.5}), StartProcess)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_matrix_product_is_computed_and_timed(device: str) -> None:
    settings = msgspec.structs.replace(JobSettings(), device=device)
    said = measure(CheckOrder(CheckNode(1, WITHIN_S, computes=True, number=0, store=None), settings))
    assert said.error == ""
    assert said.exchange_s is None
    assert 0 < (said.product_s or 0) < 300


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("typed", "enabled"), [((), False), (("--network-check",), True)])
def test_network_check_on_the_command_line_reaches_the_policy_and_leaves_its_time_as_it_is(
    typed: tuple[str, ...], enabled: bool, tmp_path: Path
) -> None:
    """As `midstep run` reads it, over a policy of the user's own."""
    script, policy = tmp_path / "train.py", tmp_path / "policy.yaml"
    script.write_text("raise SystemExit\n")
    policy.write_text("node_check: {within_s: 12}\n")
    read = command.make_context("run", [*typed, "--policy", str(policy), str(script)]).params
    start = asked_for(**{name: read[name] for name in inspect.signature(asked_for).parameters})
    assert policy_of(start).node_check == NodeCheckPolicy(enabled=enabled, within_s=12.0)
