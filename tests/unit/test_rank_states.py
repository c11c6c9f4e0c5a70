"""The ranks that are waited for follow from where the ranks stand, and from nothing else."""

from midstep.controller.recovery.events import DeadlinePassed, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import RankState
from midstep.policies.schema import Policy, RungPolicy
from midstep.protocol.messages import CreateNode, NodeLost, Quiesce, RankFinished, Release
from midstep.protocol.types import Rung
from midstep.testing.fake_cluster import FakeCluster, job, only


def finished(cluster: FakeCluster, rank: int) -> RankFinished:
    """A train function that has returned."""
    return RankFinished(rank, cluster.machine.generation, cluster.holder(rank).incarnation, 1)


def test_no_start_is_overdue_while_nodes_are_awaited() -> None:
    """The processes that were on their way were ended when the world was given up: nobody is at fault for that."""
    ladder = (RungPolicy(Rung.RECOVER_IN_PLACE), RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP))
    cluster = FakeCluster(job(spares=0), Policy(ladder=ladder, save_before_reschedule=False), creates=True)
    cluster.start()
    cluster.feed(cluster.exited(1))
    assert cluster.holder(1).state is RankState.STARTING
    start_s = cluster.now + cluster.machine.state.policy.deadlines.start_s
    asked = cluster.feed(NodeLost("node1", "gone", cluster.now))
    assert only(asked, CreateNode)
    cluster.expect(Phase.WAITING)
    decided = cluster.machine.incidents[-1].decisions
    assert decided[-1].rung is Rung.RESCHEDULE_POD
    cluster.now = start_s + 1.0
    assert cluster.feed(DeadlinePassed()) == []
    cluster.expect(Phase.WAITING)
    assert cluster.machine.incidents[-1].decisions == decided


def test_a_process_that_has_ended_well_is_not_asked_to_stop(cluster: FakeCluster) -> None:
    """Nor waited for: it would not answer."""
    released = cluster.feed(*(finished(cluster, rank) for rank in range(4)))
    assert len(only(released, Release)) == 4
    cluster.feed(cluster.exited(0, 0), cluster.exited(1, 0))
    asked = only(cluster.feed(StopRequested("Ctrl-C")), Quiesce)
    assert [order.rank for order in asked] == [2, 3]
    cluster.feed(cluster.quiesced(2, 1), cluster.quiesced(3, 1))
    assert cluster.machine.state.saving.outstanding


def test_status_calls_a_rank_training_from_the_resume_on(cluster: FakeCluster) -> None:
    """Whether its first step is committed is the job's phase, and not a rank's state."""
    cluster.feed(cluster.exited(1))
    cluster.feed(*(cluster.quiesced(rank, 1) for rank in (0, 2, 3)), cluster.joined(1, own=1))
    cluster.feed(*(cluster.ready(rank, 1) for rank in range(4)))
    assert cluster.holder(0).state is RankState.RESUMING
    assert {rank.state for rank in cluster.machine.status(cluster.now).ranks} == {"training"}
