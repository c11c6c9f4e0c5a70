"""How many steps an incident has lost is said only where somebody was left who knew how far training was."""

from midstep.protocol.incidents import Outcome
from midstep.protocol.types import RestoreSource
from midstep.testing.answering_cluster import AnsweringCluster

ON_DISK = 3


def training_on(nodes: int) -> AnsweringCluster:
    cluster = AnsweringCluster(nodes=nodes, spares=0, creates_nodes=True).start()
    cluster.checkpoints = (ON_DISK,)
    return cluster


def test_with_all_nodes_gone_nobody_knows_how_many_steps_are_lost() -> None:
    """What the controller knows is from the last resume; training may have gone on for hours."""
    cluster = training_on(1)
    cluster.lose_node("node0")
    (incident,) = cluster.incidents
    assert (incident.outcome, incident.restore) == (Outcome.RESUMED, RestoreSource.CHECKPOINT)
    assert not incident.committed_is_known


def test_a_survivor_knows_how_many_steps_are_lost() -> None:
    """It says so when it has stopped."""
    cluster = training_on(2)
    cluster.lose_node("node1")
    (incident,) = cluster.incidents
    assert (incident.outcome, incident.restore) == (Outcome.RESUMED, RestoreSource.REPLICA)
    assert incident.committed_is_known
    assert incident.committed_before == incident.resumed_step
