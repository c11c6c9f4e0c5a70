"""No process is left running where its rank is not any more."""

from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Policy, RungPolicy
from midstep.protocol.messages import NodeJoined, NodeLost, ProcessStarted, StartProcess, StopProcess
from midstep.protocol.types import Rung, RunningProcess, StoreEndpoint
from midstep.testing.fake_cluster import FakeCluster, job, only


def all_exit(cluster: FakeCluster, ranks: list[int]) -> list[object]:
    """Ranks die one after the other."""
    bodies: list[object] = []
    for rank in ranks:
        bodies += cluster.feed(cluster.exited(rank))
    return bodies


def test_a_world_that_starts_anew_keeps_every_rank_on_its_node(cluster: FakeCluster) -> None:
    """A rank that went elsewhere would leave its old process behind; where it stays, the agent ends it first."""
    cluster.feed(NodeLost("node0", "gone", cluster.now))  # ranks 0 and 1 go to node2
    where = {rank: cluster.holder(rank).node for rank in range(4)}
    bodies = all_exit(cluster, [2, 3])
    assert cluster.machine.phase is Phase.STARTING
    assert {rank: cluster.holder(rank).node for rank in range(4)} == where
    assert [order.rank for order in only(bodies, StartProcess)][-4:] == [0, 1, 2, 3]


def test_a_node_that_was_given_up_and_is_back_ends_its_old_processes(cluster: FakeCluster) -> None:
    """Its ranks have gone elsewhere meanwhile; those of other nodes are not touched."""
    cluster.feed(NodeLost("node1", "no word for 3 s", cluster.now))
    old = tuple(RunningProcess(rank, 100 + rank, 1, 1) for rank in (2, 3))
    bodies = cluster.feed(NodeJoined("node1", "node1", StoreEndpoint("127.0.0.1", 1), old))
    assert [(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)] == [(2, 1), (3, 1)]


def test_a_node_that_greets_a_new_controller_keeps_its_processes(cluster: FakeCluster) -> None:
    """They are those that the ranks have."""
    now = tuple(RunningProcess(rank, 100 + rank, 1, 1) for rank in (2, 3))
    bodies = cluster.feed(NodeJoined("node1", "node1", StoreEndpoint("127.0.0.1", 1), now))
    assert only(bodies, StopProcess) == []


def test_a_start_that_is_still_on_its_way_is_called_back() -> None:
    """When its node is left the process may not have been reported yet."""
    rungs = (RungPolicy(Rung.RECOVER_IN_PLACE, attempts=2), RungPolicy(Rung.RECOVER), RungPolicy(Rung.STOP))
    cluster = FakeCluster(policy=Policy(ladder=rungs)).start()
    for rank in (2, 3):
        cluster.feed(cluster.exited(rank))  # both are to start again on node1
    assert cluster.holder(3).pid == 0
    cluster.feed(cluster.exited(2))
    bodies = cluster.feed(cluster.exited(2))  # its replacement has died twice: node1 is left
    assert [order.rank for order in only(bodies, StartProcess)] == [2, 3]
    assert (3, 2) in [(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)]


def test_a_world_that_has_joined_before_must_join_again_in_time(cluster: FakeCluster) -> None:
    """A rank that is stuck before its train function does not hold up the job for ever."""
    all_exit(cluster, [0, 1, 2, 3])
    assert cluster.machine.phase is Phase.STARTING
    assert cluster.machine.next_deadline() is not None


def test_a_start_that_is_heard_of_while_nodes_are_awaited_is_called_back() -> None:
    """The order to end the process overtook the one to start it; its rank may not exist in the world that comes."""
    cluster = FakeCluster(job(spares=0), creates=True)
    cluster.start()
    cluster.feed(cluster.exited(3))
    given = cluster.holder(3).incarnation
    cluster.feed(NodeLost("node0", "gone", cluster.now), cluster.exited(2))
    cluster.expect(Phase.WAITING)
    late = RunningProcess(3, 203, given, 2)
    bodies = cluster.feed(ProcessStarted("node1", late, warm=True))
    assert [(stop.rank, stop.incarnation) for stop in only(bodies, StopProcess)] == [(3, given)]
