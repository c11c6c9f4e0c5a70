"""A world that grows while the ranks that it has keep their processes: what is prepared, and what may come between."""

from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import ControllerStarted
from midstep.controller.recovery.start import TRIES
from midstep.controller.recovery.state import Phase
from midstep.controller.routes import Routes
from midstep.policies.rules import broken_rules, job_settings
from midstep.policies.schema import Policy, ScalePolicy
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import (
    FaultReported,
    NodeLost,
    ProcessExited,
    Quiesce,
    Rejoin,
    StartProcess,
    StopProcess,
)
from midstep.protocol.types import (
    FaultKind,
    FaultReport,
    LocalStateTransfer,
    RestoreSource,
    Rung,
    rank_address,
)
from midstep.testing.fake_cluster import FakeCluster, job, only

from .test_draining import BOUNDARY
from .test_scaling import small

IN_PLACE = Policy(scale=ScalePolicy(min_nodes=1, min_interval_s=0.0, in_place=True))
NEW = (2, 3)


@pytest.fixture
def cluster() -> FakeCluster:
    """A job for two nodes that runs on one, and may grow."""
    small_world = FakeCluster(job(spares=0), IN_PLACE).start()
    small(small_world)
    return small_world


def get_ready(cluster: FakeCluster) -> None:
    """A node comes, and the processes of the new ranks reach their train function."""
    cluster.feed(cluster.node("node9"))
    cluster.feed(*(cluster.waiting(rank, "node9") for rank in NEW))


def reach_boundary(cluster: FakeCluster) -> list[Any]:
    """Everything up to where the ranks that trained stand still; return what is ordered then."""
    get_ready(cluster)
    cluster.feed(cluster.clocks("node0"))
    cluster.expect(Phase.PAUSING)
    return cluster.feed(cluster.quiesced(0, BOUNDARY), cluster.quiesced(1, BOUNDARY))


def test_new_ranks_get_ready_while_the_others_train(cluster: FakeCluster) -> None:
    """Their processes learn of the larger world; nobody is asked to stop before they are ready."""
    bodies = cluster.feed(cluster.node("node9"))
    starts = only(bodies, StartProcess)
    assert [(each.rank, each.local_rank, each.world_size, each.nodes) for each in starts] == [
        (2, 0, 4, 2),
        (3, 1, 4, 2),
    ]
    assert all(each.early for each in starts)
    assert only(bodies, Quiesce) == []
    cluster.expect(Phase.RUNNING)
    get_ready(cluster)
    orders = only(cluster.feed(cluster.clocks("node0")), Quiesce)
    assert orders == [Quiesce(rank, cluster.machine.generation, BOUNDARY) for rank in (0, 1)]


def test_at_the_boundary_they_join_and_no_process_ends(cluster: FakeCluster) -> None:
    """They get shards from the others, and begin with the rank-local states of these; no step is repeated."""
    pids = {rank: cluster.holder(rank).pid for rank in (0, 1)}
    spent = cluster.machine.state.spent
    bodies = reach_boundary(cluster)
    assert only(bodies, StartProcess) == []
    assert [order.rank for order in only(bodies, Quiesce)] == [*NEW]
    rejoins = only(cluster.feed(*map(cluster.joined, NEW)), Rejoin)
    assert {(each.part.target_step, each.part.world_size, each.part.restore) for each in rejoins} == {
        (BOUNDARY, 4, RestoreSource.REPLICA)
    }
    own = {move for each in rejoins for move in each.part.local_states}
    assert own == {LocalStateTransfer(2, 0, 0), LocalStateTransfer(3, 1, 1)}
    assert {move.destination for each in rejoins for move in each.part.transfers} == {*NEW}
    cluster.pass_barrier_two(BOUNDARY)
    incident = cluster.machine.incidents[-1]
    assert (incident.outcome, incident.rung, incident.steps_lost) == (Outcome.RESUMED, Rung.RECOVER, 0)
    assert "all others keep theirs" in incident.decisions[0].reason
    assert {rank: cluster.holder(rank).pid for rank in (0, 1)} == pids
    assert cluster.machine.state.spent == spent
    assert [cluster.holder(rank).node for rank in range(4)] == ["node0", "node0", "node9", "node9"]


def test_orders_for_a_new_rank_reach_the_process_that_was_started_for_it(cluster: FakeCluster) -> None:
    """Wherever its process was before the world got smaller."""
    routes = Routes()
    for event, _ in cluster.journal:
        routes.learn(event, ())
    routes._hosts[rank_address(2)] = (1, "node/node1")

    def learn(*events: Any) -> None:
        for event in events:
            routes.learn(event, cluster.machine.handle(event, cluster.now))

    learn(cluster.node("node9"))
    learn(*(cluster.waiting(rank, "node9") for rank in NEW))
    learn(cluster.clocks("node0"), cluster.quiesced(0, BOUNDARY), cluster.quiesced(1, BOUNDARY))
    assert [routes.connection(rank_address(rank)) for rank in NEW] == ["node/node9", "node/node9"]


def failed(cluster: FakeCluster, rank: int = 2) -> FaultReported:
    """The early process of a new rank could not be started."""
    incarnation = cluster.newcomer(rank).incarnation
    return FaultReported(
        FaultReport(FaultKind.START_FAILED, cluster.now, "node/node9", "no memory", rank, "node9", 1, incarnation)
    )


def test_a_new_rank_that_fails_is_tried_again_later_and_not_for_ever(cluster: FakeCluster) -> None:
    """Training is not touched; after some attempts the node stays a spare one, and another one would be used."""
    cluster.feed(cluster.node("node9"))
    for attempt in range(TRIES):
        assert cluster.machine.state.planned.current is not None, attempt
        stops = only(cluster.feed(failed(cluster)), StopProcess)
        assert {stop.rank for stop in stops} == {*NEW}
        cluster.expect(Phase.RUNNING)
        cluster.overdue()
    assert cluster.machine.state.planned.current is None
    assert len(cluster.machine.incidents) == 1
    starts = only(cluster.feed(cluster.node("node10")), StartProcess)
    assert [start.rank for start in starts] == [*NEW]


def test_a_node_that_is_lost_while_its_ranks_get_ready_changes_nothing(cluster: FakeCluster) -> None:
    """It has none of the ranks that train."""
    cluster.feed(cluster.node("node9"))
    cluster.feed(NodeLost("node9", "no word", cluster.now))
    cluster.expect(Phase.RUNNING)
    assert cluster.machine.state.planned.current is None
    assert cluster.machine.state.world.size == 2


def test_a_node_that_is_lost_on_the_way_to_the_boundary_leaves_the_world_as_it_was(cluster: FakeCluster) -> None:
    """All train on from the boundary."""
    get_ready(cluster)
    cluster.feed(cluster.clocks("node0"))
    cluster.feed(NodeLost("node9", "no word", cluster.now))
    cluster.feed(cluster.quiesced(0, BOUNDARY))
    rejoins = only(cluster.feed(cluster.quiesced(1, BOUNDARY)), Rejoin)
    assert {(each.rank, each.part.target_step, each.part.world_size) for each in rejoins} == {
        (0, BOUNDARY, 2),
        (1, BOUNDARY, 2),
    }


def test_a_new_rank_that_dies_on_the_way_to_the_boundary_gets_another_process(cluster: FakeCluster) -> None:
    """All stop there anyhow."""
    get_ready(cluster)
    cluster.feed(cluster.clocks("node0"))
    cluster.feed(ProcessExited("node9", cluster.newcomer(2), -9, cluster.now, expected=False))
    bodies = cluster.feed(cluster.quiesced(0, BOUNDARY), cluster.quiesced(1, BOUNDARY))
    starts = only(bodies, StartProcess)
    assert [(start.rank, start.early, start.connected, start.world_size) for start in starts] == [(2, False, False, 4)]
    cluster.feed(*map(cluster.joined, NEW))
    cluster.pass_barrier_two(BOUNDARY)


def test_a_new_rank_that_fails_on_the_way_to_the_boundary_is_ended_in_any_case(cluster: FakeCluster) -> None:
    """Its process may be there still, stopped: where the growth is given up after all, nothing else ends it."""
    get_ready(cluster)
    cluster.feed(cluster.clocks("node0"))
    incarnation = cluster.newcomer(3).incarnation
    stops = only(cluster.feed(failed(cluster, 3)), StopProcess)
    assert [(stop.rank, stop.incarnation) for stop in stops] == [(3, incarnation)]
    stops = only(cluster.feed(cluster.exited(1)), StopProcess)
    assert [stop.rank for stop in stops] == [2]


def test_a_new_rank_that_dies_before_it_is_ready_is_new_in_the_next_attempt(cluster: FakeCluster) -> None:
    """It has no rank-local state that could be lost; the others keep their processes all the same."""
    reach_boundary(cluster)
    cluster.feed(*map(cluster.joined, NEW))
    cluster.feed(cluster.exited(2))
    cluster.feed(cluster.quiesced(0, BOUNDARY), cluster.quiesced(1, BOUNDARY))
    third = cluster.quiesced(3, 0)
    cluster.feed(msgspec.structs.replace(third, report=cluster.joined(3).report))
    rejoins = only(cluster.feed(cluster.joined(2)), Rejoin)
    assert {each.part.world_size for each in rejoins} == {4}
    own = {move for each in rejoins for move in each.part.local_states}
    assert own == {LocalStateTransfer(2, 0, 0), LocalStateTransfer(3, 1, 1)}


def test_a_rank_that_has_been_ready_once_is_not_new(cluster: FakeCluster) -> None:
    """What it has drawn since is its own: with every copy of it lost it does not get that of another rank."""
    reach_boundary(cluster)
    cluster.feed(*map(cluster.joined, NEW))
    cluster.pass_barrier_two(BOUNDARY)
    cluster.feed(cluster.exited(2))
    step = BOUNDARY + 3
    cluster.feed(*(cluster.quiesced(rank, step) for rank in (0, 1, 3)))
    bodies = cluster.feed(cluster.joined(2))
    assert only(bodies, Rejoin) == []
    last = cluster.machine.incidents[-1].decisions[-1]
    assert last.rung is Rung.RESCHEDULE_POD
    assert any("the rank-local state" in each.reason for each in last.skipped)


def test_a_restarted_controller_asks_again_for_what_the_growth_waits_for(cluster: FakeCluster) -> None:
    """Early starts in the larger world, the stop at the boundary, and the order to join."""
    cluster.feed(cluster.node("node9"))
    starts = only(cluster.feed(ControllerStarted(term=2)), StartProcess)
    assert [(start.rank, start.early, start.world_size) for start in starts] == [(2, True, 4), (3, True, 4)]
    cluster.feed(*(cluster.waiting(rank, "node9") for rank in NEW))
    cluster.feed(cluster.clocks("node0"))
    generation = cluster.machine.generation
    stops = only(cluster.feed(ControllerStarted(term=3)), Quiesce)
    assert stops == [Quiesce(rank, generation, BOUNDARY) for rank in (0, 1)]
    cluster.feed(cluster.quiesced(0, BOUNDARY), cluster.quiesced(1, BOUNDARY))
    orders = only(cluster.feed(ControllerStarted(term=4)), Quiesce)
    assert orders == [Quiesce(rank, generation + 1, replaces=True) for rank in NEW]


def test_what_growth_in_place_needs_is_said() -> None:
    """A policy that could not do it is refused; agents and ranks are told of one that can."""
    alone = Policy(scale=ScalePolicy(in_place=True))
    assert [str(problem.key) for problem in broken_rules(alone)] == ["scale.in_place"]
    without = msgspec.structs.replace(IN_PLACE, restore=(RestoreSource.CHECKPOINT,))
    assert "scale.in_place" in {problem.key for problem in broken_rules(without)}
    assert broken_rules(IN_PLACE) == []
    assert job_settings(IN_PLACE, "/", spares=0).grows_in_place
