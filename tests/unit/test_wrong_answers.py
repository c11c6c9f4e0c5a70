"""Ranks whose answers cannot be: they are at fault, and what others have done for the recovery stays theirs."""

from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import Quiesce, StartProcess
from midstep.protocol.types import FaultKind
from midstep.testing.fake_cluster import FakeCluster, only


def test_a_rank_that_comes_back_at_another_step_is_replaced_and_nobody_else(cluster: FakeCluster) -> None:
    """Rank 1 was killed and its replacement has come back as told; rank 2 says that it stands a step further."""
    cluster.feed(cluster.exited(1))
    ranks = range(cluster.job.world_size)
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5, peers=[peer for peer in ranks if peer != rank]))
    cluster.feed(cluster.joined(1, own=5))
    cluster.expect(Phase.REJOINING)
    bodies = cluster.feed(cluster.ready(1, 5), cluster.ready(2, 6))
    assert [start.rank for start in only(bodies, StartProcess)] == [2]
    assert sorted(quiesce.rank for quiesce in only(bodies, Quiesce)) == [0, 1, 3]
    (report,) = [each for each in cluster.machine.incidents[0].reports if each.rank == 2]
    assert report.kind is FaultKind.CORRUPTION
    assert report.detail == "it came back at step 6, all others go to 5"
