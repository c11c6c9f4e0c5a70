"""A platform speaks of itself and of nodes that it will take away, and the machine answers with orders."""

from typing import Any

import msgspec
import pytest

from midstep.controller.admission import refusal
from midstep.controller.recovery.events import KillNodeRequested
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState
from midstep.controller.routes import Routes
from midstep.policies.schema import Policy, ScalePolicy, SubHealthAction, default_policy
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import (
    ArmFault,
    CreateNode,
    Envelope,
    GoingCause,
    KillNode,
    NodeGoing,
    NodeLost,
    NodeRefused,
    NodeStaying,
    PlatformJoined,
    ProbeProgress,
    Quiesce,
    StartProcess,
)
from midstep.protocol.types import PLATFORM, FaultAction, RestoreSource, Rung
from midstep.testing.fake_cluster import FakeCluster, job, only

GOING = NodeGoing("node1", "m1 is being drained", 120.0)


def names(bodies: list[Any]) -> list[str]:
    """The nodes that the platform is asked for."""
    return [order.node for order in only(bodies, CreateNode)]


def state_of(cluster: FakeCluster, node: str) -> NodeState:
    return cluster.machine.state.world.nodes[node].state


def early(bodies: list[Any]) -> list[int]:
    """The ranks for which processes are started beside those that hold them."""
    return [start.rank for start in only(bodies, StartProcess) if start.early]


# --- it is there ----------------------------------------------------------------------------------------------------


def test_a_platform_is_asked_for_all_nodes_and_spares_of_a_job_that_begins() -> None:
    cluster = FakeCluster(job(nodes=2, spares=1))
    assert names(cluster.feed(PlatformJoined(can_create=True, can_kill=True))) == ["node0", "node1", "node2"]
    cluster.feed(*(cluster.node(f"node{number}") for number in range(3)))
    assert cluster.machine.phase is Phase.STARTING


def test_nodes_that_are_on_their_way_are_not_asked_for() -> None:
    cluster = FakeCluster(job(nodes=2, spares=1))
    assert names(cluster.feed(PlatformJoined(can_create=True, can_kill=True, nodes=("node0", "node1")))) == ["node2"]
    assert names(cluster.feed(PlatformJoined(can_create=True, can_kill=True, nodes=("node0", "node1", "node2")))) == []


def test_a_platform_that_has_forgotten_a_node_is_asked_for_it_again() -> None:
    """It was restarted, say, before it had made the node."""
    cluster = FakeCluster(job(nodes=2, spares=0))
    cluster.feed(PlatformJoined(can_create=True, can_kill=True))
    assert names(cluster.feed(PlatformJoined(can_create=True, can_kill=True, nodes=("node0",)))) == ["node1"]


def test_a_platform_that_can_make_no_nodes_is_asked_for_none() -> None:
    cluster = FakeCluster(job(nodes=2, spares=1), creates=True)
    assert names(cluster.feed(PlatformJoined(can_create=False, can_kill=True))) == []
    assert names(cluster.feed(NodeLost("node0", "gone", cluster.now))) == []


def test_a_platform_that_comes_back_is_asked_for_the_spare_that_is_missing() -> None:
    cluster = FakeCluster(job(spares=1)).start()
    assert names(cluster.feed(NodeLost("node2", "gone", cluster.now))) == []
    assert names(cluster.feed(PlatformJoined(can_create=True, can_kill=True, nodes=("node0", "node1")))) == ["node3"]


def test_a_node_is_killed_by_its_own_agent_where_the_platform_cannot() -> None:
    cluster = FakeCluster().start()
    assert cluster.feed(KillNodeRequested("node1")) == [KillNode("node1")]
    cluster.feed(PlatformJoined(can_create=False, can_kill=False))
    (order,) = cluster.feed(KillNodeRequested("node1"))
    assert isinstance(order, ArmFault)
    assert order.fault.action is FaultAction.KILL_NODE


# --- nodes that go --------------------------------------------------------------------------------------------------


def test_the_ranks_of_a_node_that_is_going_get_ready_on_a_spare(cluster: FakeCluster) -> None:
    """Training goes on meanwhile: it is a planned change, and no incident yet."""
    assert early(cluster.feed(GOING)) == [2, 3]
    assert cluster.machine.phase is Phase.RUNNING
    assert cluster.machine.incidents == ()
    (node,) = [node for node in cluster.machine.status(cluster.now).nodes if node.node == "node1"]
    assert "going: m1 is being drained, within 120 s; its ranks move to node2" in node.note


@pytest.mark.parametrize("sub_health", [SubHealthAction.IGNORE, SubHealthAction.LEAVE_NOW, SubHealthAction.DRAIN])
def test_what_the_policy_says_of_nodes_that_are_not_well_is_not_asked(sub_health: SubHealthAction) -> None:
    """The node goes, whatever the job thinks of it; and there is time for a step boundary."""
    cluster = FakeCluster(job(spares=1), Policy(sub_health=sub_health)).start()
    assert early(cluster.feed(GOING)) == [2, 3]


def test_a_node_that_is_going_takes_no_budget() -> None:
    """Whoever takes nodes away may do so as often as they like; it is no failure of the job."""
    policy = default_policy()
    ladder = tuple(
        msgspec.structs.replace(entry, budget=msgspec.structs.replace(entry.budget, per_job=1))
        if entry.rung is Rung.RECOVER
        else entry
        for entry in policy.ladder
    )
    cluster = FakeCluster(job(spares=3), msgspec.structs.replace(policy, ladder=ladder)).start()
    cluster.feed(NodeLost("node1", "gone", cluster.now))
    cluster.recover(3)
    assert early(cluster.feed(cluster.unwell("node0"))) == []  # the budget is spent
    assert early(cluster.feed(NodeGoing("node0", "preempted"))) == [0, 1]
    plan = cluster.machine.state.planned.current
    assert plan is not None
    assert plan.charges == ()


def alone(**changes: Any) -> FakeCluster:
    """A job with all its ranks on one node, and one spare."""
    return FakeCluster(job(nodes=1, spares=1), msgspec.structs.replace(default_policy(), **changes)).start()


def test_where_all_ranks_are_on_a_node_that_is_going_they_save_between_two_steps_and_begin_again_on_the_spare() -> None:
    """Nobody stays from whom a new process could get its state; no step is lost all the same, and no budget taken."""
    cluster = alone()
    assert only(cluster.feed(NodeGoing("node0", "drained")), ProbeProgress)
    step, same = (order.after_step for order in only(cluster.feed(cluster.clocks("node0")), Quiesce))
    assert step == same
    cluster.feed(cluster.quiesced(0, step), cluster.quiesced(1, step))
    cluster.expect(Phase.SAVING)
    saved = [cluster.saved(rank, step=step) for rank in (1, 0)]
    starts = only(cluster.feed(*saved), StartProcess)
    assert [start.rank for start in starts] == [0, 1]
    assert {holder.node for holder in cluster.machine.state.world.holders} == {"node1"}
    (incident,) = cluster.machine.incidents
    assert incident.decisions[-1].rung is Rung.RESCHEDULE_POD
    assert "node node0 is going (drained), and its ranks cannot move alone" in incident.decisions[-1].reason
    assert not any(budget.used for budget in cluster.machine.status(cluster.now).budgets)


def test_where_no_spare_is_there_a_smaller_world_continues_without_a_node_that_is_going() -> None:
    """Between two steps, with a checkpoint of there: nothing is lost, and no budget taken."""
    cluster = FakeCluster(job(spares=0), Policy(scale=ScalePolicy(min_nodes=1))).start()
    assert only(cluster.feed(GOING), ProbeProgress)
    orders = only(cluster.feed(cluster.clocks("node0"), cluster.clocks("node1")), Quiesce)
    (step,) = {order.after_step for order in orders}
    assert step is not None
    cluster.feed(*(cluster.quiesced(rank, step) for rank in range(4)))
    starts = only(cluster.feed(*(cluster.saved(rank, step=step) for rank in range(4))), StartProcess)
    assert [start.rank for start in starts] == [0, 1]
    (incident,) = cluster.machine.incidents
    reason = incident.decisions[-1].reason
    assert "node node1 is going (m1 is being drained, within 120 s), and no node can take its place" in reason
    assert "all processes are restarted from it, with 1 node" in reason
    assert not any(budget.used for budget in cluster.machine.status(cluster.now).budgets)


@pytest.mark.parametrize(
    "changes",
    [
        {"ladder": tuple(entry for entry in default_policy().ladder if entry.rung is not Rung.RESCHEDULE_POD)},
        {"restore": (RestoreSource.REPLICA,)},
    ],
)
def test_where_the_policy_restarts_no_world_from_a_checkpoint_a_node_that_is_going_stays_in_use(
    changes: dict[str, Any],
) -> None:
    cluster = alone(**changes)
    assert only(cluster.feed(NodeGoing("node0", "drained")), ProbeProgress) == []
    assert "recover cannot be taken" in cluster.machine.incidents[-1].ended_reason


def test_a_spare_that_goes_before_the_boundary_keeps_all_where_they_are() -> None:
    cluster = alone()
    cluster.feed(NodeGoing("node0", "drained"))
    cluster.feed(NodeLost("node1", "gone", cluster.now))
    assert cluster.machine.state.planned.current is None
    assert cluster.machine.phase is Phase.RUNNING


def test_a_rank_that_fails_on_a_node_that_is_going_moves_to_the_spare_at_once(cluster: FakeCluster) -> None:
    """A machine that is shut down ends its ranks itself, some time after it has said that it goes."""
    cluster.feed(GOING, cluster.exited(3))
    (incident,) = cluster.machine.incidents
    assert incident.decisions[-1].rung is Rung.RECOVER
    assert "node node1 is about to go: m1 is being drained, within 120 s" in incident.decisions[-1].reason
    assert sorted(holder.rank for holder in cluster.machine.state.world.on("node2")) == [2, 3]


def test_a_rank_that_fails_on_a_node_that_is_going_restarts_there_if_it_cannot_move() -> None:
    for cluster in (FakeCluster(job(spares=0)).start(), FakeCluster(job(nodes=1, spares=1)).start()):
        cluster.feed(NodeGoing("node0", "preempted"), cluster.exited(1))
        assert cluster.machine.incidents[-1].decisions[-1].rung is Rung.RECOVER_IN_PLACE


def test_without_a_spare_a_node_is_asked_for_and_the_ranks_move_when_it_is_there() -> None:
    cluster = FakeCluster(job(spares=0), creates=True).start()
    bodies = cluster.feed(GOING)
    assert names(bodies) == ["node2"]
    assert early(bodies) == []
    assert early(cluster.feed(cluster.node("node2"))) == [2, 3]


def test_where_no_node_can_be_made_it_is_written_down() -> None:
    cluster = FakeCluster(job(spares=0)).start()
    assert cluster.feed(GOING) == []
    (incident,) = cluster.machine.incidents
    assert incident.outcome is Outcome.DISMISSED
    assert "node node1 is going, no spare node to take its place" in incident.ended_reason


def test_a_spare_that_is_going_is_not_used_and_another_is_asked_for() -> None:
    cluster = FakeCluster(job(spares=1), creates=True).start()
    assert names(cluster.feed(NodeGoing("node2", "preempted"))) == ["node3"]
    assert state_of(cluster, "node2") is NodeState.UNFIT
    assert early(cluster.feed(GOING)) == []


def test_a_node_that_stays_after_all_is_used_again(cluster: FakeCluster) -> None:
    cluster.feed(NodeGoing("node2", "preempted"))
    cluster.feed(NodeStaying("node2"))
    assert state_of(cluster, "node2") is NodeState.SPARE
    assert early(cluster.feed(GOING)) == [2, 3]
    cluster.feed(NodeStaying("node1"))
    assert cluster.machine.state.planned.current is None
    assert state_of(cluster, "node1") is NodeState.ACTIVE


def test_a_node_that_is_going_for_two_causes_stays_when_both_are_over(cluster: FakeCluster) -> None:
    """The role that had left its machine uses it again; the platform takes it away all the same."""
    cluster.feed(GOING, NodeGoing("node1", "role a has left its machine", cause=GoingCause.ROLE))
    cluster.feed(NodeStaying("node1", GoingCause.ROLE))
    assert cluster.machine.state.planned.going == {"node1"}
    assert cluster.machine.state.planned.current is not None
    cluster.feed(NodeStaying("node1"))
    assert cluster.machine.state.planned.going == set()
    assert cluster.machine.state.planned.current is None


def test_a_node_that_stays_may_be_what_a_job_waits_for_that_begins() -> None:
    cluster = FakeCluster(job(nodes=2, spares=0))
    cluster.feed(cluster.node("node0"), NodeGoing("node0", "preempted"), cluster.node("node1"))
    cluster.expect(Phase.WAITING)
    cluster.feed(NodeStaying("node0"))
    cluster.expect(Phase.STARTING)


def test_what_is_said_of_nodes_that_are_not_there_changes_nothing(cluster: FakeCluster) -> None:
    assert cluster.feed(NodeGoing("nowhere", "drained"), NodeStaying("nowhere"), NodeStaying("node1")) == []
    cluster.feed(GOING)
    assert cluster.feed(GOING) == []  # once more


def test_a_refused_node_leaves_one_that_is_going_in_use() -> None:
    """Its end is answered when it comes, as any loss of a node is."""
    cluster = FakeCluster(job(spares=0), creates=True).start()
    cluster.feed(GOING)
    assert cluster.feed(NodeRefused("node2", "no more machines")) == []
    assert cluster.machine.phase is Phase.RUNNING
    cluster.feed(NodeLost("node1", "drained", cluster.now))
    assert cluster.machine.phase is not Phase.RUNNING


def said_by(sender: str, body: Any) -> str | None:
    """Return why what a sender says over its own connection is not believed."""
    return refusal(sender, Envelope(1, "test", sender, "controller", 0, 1, 1, 0, body), 4, Routes())


@pytest.mark.parametrize("body", [PlatformJoined(True, True), NodeGoing("node2", "drained"), NodeStaying("node1")])
def test_only_the_platform_may_say_so(body: Any) -> None:
    assert said_by(PLATFORM, body) is None
    assert said_by("node/node1", body) is not None
    assert said_by("rank/1", body) is not None


def test_a_node_may_say_that_it_is_going_itself() -> None:
    assert said_by("node/node1", GOING) is None
