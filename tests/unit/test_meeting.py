"""Where a generation meets, and with which secret: the same for all, another in each generation, and elsewhere when
ranks could not link up."""

import pytest

from midstep.controller.recovery.events import DeadlinePassed
from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import Rejoin, StartProcess, StoreMoved
from midstep.protocol.types import FaultKind, Rendezvous
from midstep.testing.fake_cluster import FakeCluster

KEY = bytes(range(32))


def meet(cluster: FakeCluster) -> Rendezvous:
    """All have stopped: return where all are sent."""
    bodies: list[object] = []
    for rank in range(cluster.job.world_size):
        bodies += cluster.feed(cluster.quiesced(rank, 5, peers=[each for each in range(4) if each != rank]))
    [met] = {body.store for body in bodies if isinstance(body, Rejoin)}
    return met


def place(cluster: FakeCluster) -> Rendezvous:
    """Where the present generation meets."""
    state = cluster.machine.state
    return state.meeting.rendezvous(state.world, state.job.job, state.generation)


def fail_to_link_up(cluster: FakeCluster, *ranks: int) -> None:
    """These ranks report it, and the time for a culprit passes."""
    cluster.feed(*(cluster.fault(rank, FaultKind.LINK_UP) for rank in ranks))
    cluster.now += 1.0
    cluster.feed(DeadlinePassed())
    cluster.expect(Phase.QUIESCING)


@pytest.fixture
def cluster() -> FakeCluster:
    """A running job of two nodes and a spare, in which a link has just broken."""
    running = FakeCluster(rendezvous_key=KEY)
    running.start()
    running.feed(running.fault(0, FaultKind.COMMUNICATION))
    running.now += 1.0
    running.feed(DeadlinePassed())
    return running


def test_after_a_failed_link_up_the_next_generation_meets_at_another_store(cluster: FakeCluster) -> None:
    """The spare's, too; and it stays where it was possible, also in later incidents."""
    hosts = [meet(cluster).host]
    for _ in range(3):
        fail_to_link_up(cluster, 0, 1, 2, 3)
        hosts.append(meet(cluster).host)
    assert hosts == ["node0", "node1", "node2", "node0"]
    cluster.pass_barrier_two(5)
    assert cluster.machine.state.world.best_store() is cluster.machine.state.world.nodes["node0"]


def test_however_many_ranks_report_it_a_link_up_has_failed_once(cluster: FakeCluster) -> None:
    """And whoever else is waited for after it."""
    meet(cluster)
    fail_to_link_up(cluster, 0, 1, 2, 3)
    assert [node.failed_link_ups for node in cluster.machine.state.world.nodes.values()] == [1, 0, 0]


def test_a_store_that_was_started_again_must_show_first_that_it_serves(cluster: FakeCluster) -> None:
    """It may be stopped again as soon as it is there; where there is another one it is not tried."""
    meet(cluster)
    cluster.feed(StoreMoved("node0", cluster.store("node0")))
    fail_to_link_up(cluster, 0)
    cluster.feed(StoreMoved("node0", cluster.store("node0")))
    assert meet(cluster).host == "node1"


def test_the_choice_holds_for_all_members_of_a_generation(cluster: FakeCluster) -> None:
    """A controller that takes over sends the orders again: to the same place, though link-ups have failed meanwhile."""
    met = meet(cluster)
    cluster.feed(cluster.fault(0, FaultKind.LINK_UP))
    assert place(cluster) == met


def test_every_generation_and_every_job_has_another_secret(cluster: FakeCluster) -> None:
    secrets = [meet(cluster).secret]
    fail_to_link_up(cluster, 0)
    secrets.append(meet(cluster).secret)
    other = FakeCluster(rendezvous_key=KEY[::-1])
    other.start()
    secrets.append(place(other).secret)
    assert len({*secrets}) == 3
    assert all(len(secret) == 32 for secret in secrets)


def test_a_replay_comes_to_the_same_secrets() -> None:
    met = []
    for _ in range(2):
        cluster = FakeCluster(rendezvous_key=KEY)
        cluster.start()
        met.append(place(cluster))
    assert met[0] == met[1]


def test_processes_that_start_together_are_told_the_same_place_and_secret() -> None:
    cluster = FakeCluster(rendezvous_key=KEY)
    bodies: list[object] = []
    for name in ("node0", "node1", "node2"):
        bodies += cluster.feed(cluster.node(name))
    starts = [body.store for body in bodies if isinstance(body, StartProcess)]
    assert len(starts) == 4
    assert len({*starts}) == 1
