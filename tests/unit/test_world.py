"""The controller's books about ranks and nodes."""

import pytest

from midstep.controller.recovery.buddies import Location
from midstep.controller.recovery.world import NEXT, NodeState, RankEvent, RankState, World
from midstep.protocol.types import StepReport, StoreEndpoint


@pytest.fixture
def world() -> World:
    """Four ranks, two to a node, on node0 and node1; node2 is a spare."""
    made = World(size=4, ranks_per_node=2)
    for number in range(3):
        made.add_node(f"node{number}", NodeState.SPARE).store = StoreEndpoint(f"host{number}", number)
    made.place(["node0", "node1", "node2"])
    return made


def test_ranks_are_placed_in_order_and_the_rest_is_spare(world: World) -> None:
    """Two to a node."""
    assert [holder.node for holder in world.holders] == ["node0", "node0", "node1", "node1"]
    assert world.named(NodeState.ACTIVE) == ["node0", "node1"]
    assert world.named(NodeState.SPARE) == ["node2"]


def test_a_world_that_does_not_fill_its_last_node_is_placed() -> None:
    """Three ranks, two to a node."""
    world = World(size=3, ranks_per_node=2)
    for name in ("a", "b"):
        world.add_node(name, NodeState.SPARE)
    world.place(["a", "b"])
    assert [holder.rank for holder in world.on("b")] == [2]


def test_lost_and_isolated_nodes_are_not_placed_into_use(world: World) -> None:
    """Their state stays."""
    world.nodes["node2"].state = NodeState.ISOLATED
    world.place(["node0", "node1", "node2"])
    assert world.nodes["node2"].state is NodeState.ISOLATED


def test_a_move_takes_all_ranks_of_a_node(world: World) -> None:
    """The new node is in use; what becomes of the old one is not decided here."""
    world.move("node1", "node2")
    assert [holder.node for holder in world.holders] == ["node0", "node0", "node2", "node2"]
    assert world.nodes["node2"].state is NodeState.ACTIVE
    assert world.on("node1") == []


def test_the_order_of_the_nodes_in_use_is_that_of_their_lowest_rank(world: World) -> None:
    """A moved rank 0 makes its node the first."""
    world.move("node0", "node2")
    assert world.group_nodes() == ["node2", "node1"]


def test_the_store_is_that_of_the_first_node_in_use(world: World) -> None:
    """A lost node's store is passed over."""
    assert world.best_store() is world.nodes["node0"]
    world.nodes["node0"].state = NodeState.LOST
    assert world.best_store() is world.nodes["node1"]


def test_a_store_at_which_link_ups_failed_comes_after_the_others(world: World) -> None:
    """Those in use first, then that of the spare, and in the end the one that failed least."""
    for failed, best in (("node0", "node1"), ("node1", "node2"), ("node2", "node0"), ("node0", "node1")):
        world.nodes[failed].failed_link_ups += 1
        assert world.best_store() is world.nodes[best]


def test_a_world_without_any_store_has_no_best_one() -> None:
    """Agents that have not joined yet."""
    world = World(size=1, ranks_per_node=1)
    world.add_node("a", NodeState.SPARE)
    world.place(["a"])
    assert world.best_store() is None


def test_places_name_the_failure_domain(world: World) -> None:
    """A node that names none is its own."""
    world.add_node("far", NodeState.SPARE, failure_domain="rack9")
    world.move("node1", "far")
    assert world.places()[0] == Location("node0", "node0")
    assert world.places()[2] == Location("far", "rack9")


def test_a_new_node_gets_a_name_that_none_has_had(world: World) -> None:
    """Names of lost nodes are not used again."""
    assert world.new_node_name() == "node3"
    world.add_node("node4", NodeState.LOST)
    world.add_node("node5", NodeState.LOST)
    assert world.new_node_name() not in world.nodes


def test_of_several_spares_the_one_that_has_waited_longest_is_taken_first(world: World) -> None:
    """One that has just come back has yet to import torch. Those of the start are taken by name."""
    for name in ("node10", "node9"):
        world.add_node(name, NodeState.SPARE)
    for name in ("node8", "node7", "node2"):
        world.add_node(name, NodeState.SPARE, late=True)
    assert world.spares() == ["node9", "node10", "node8", "node7", "node2"]
    world.move("node0", "node9")
    world.add_node("node8", NodeState.SPARE, late=True)
    assert world.spares() == ["node10", "node7", "node2", "node8"]


def test_a_lost_process_leaves_its_rank(world: World) -> None:
    """Place, incarnation and what was committed stay; the process's own is gone."""
    holder = world.holders[1]
    holder.pid, holder.incarnation, holder.committed = 42, 3, 7
    world.take(holder, RankEvent.START_ORDERED)
    holder.resilient, holder.connected = True, True
    holder.report = StepReport(7, ready=False, clean=True)
    world.lose(holder)
    assert (holder.node, holder.incarnation, holder.committed) == ("node0", 3, 7)
    assert (holder.pid, holder.state, holder.resilient, holder.connected) == (0, RankState.ABSENT, False, False)
    assert holder.report is None


def test_pids_are_those_of_living_processes(world: World) -> None:
    """A rank without a process has none."""
    world.holders[2].pid = 7
    assert world.pids() == {2: 7}


def test_holders_are_found_by_state(world: World) -> None:
    """Any of several."""
    world.take(world.holders[3], RankEvent.START_ORDERED)
    world.take(world.holders[0], RankEvent.START_ORDERED)
    world.take(world.holders[0], RankEvent.JOINED)
    assert [holder.rank for holder in world.in_state(RankState.STARTING, RankState.JOINED)] == [0, 3]
    assert world.count(RankState.STARTING) == 1


def test_an_event_that_does_not_fit_leaves_a_rank_where_it_is(world: World) -> None:
    """Whatever is reported, in whatever order."""
    assert (RankState.ABSENT, RankEvent.READY) not in NEXT
    world.take(world.holders[0], RankEvent.READY)
    assert world.ranks(RankState.ABSENT) == {0, 1, 2, 3}


def test_a_world_of_another_size_knows_where_its_ranks_stand(world: World) -> None:
    """Those that it loses stand nowhere; those that it gets have no process."""
    for holder in world.holders:
        world.take(holder, RankEvent.START_ORDERED)
    world.resize(2)
    assert world.ranks(*RankState) == world.ranks(RankState.STARTING) == {0, 1}
    world.resize(4)
    assert (world.ranks(RankState.STARTING), world.ranks(RankState.ABSENT)) == ({0, 1}, {2, 3})
