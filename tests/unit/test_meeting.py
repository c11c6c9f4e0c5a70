"""Where a generation meets, and with which secret: the same for all, another in each generation, and elsewhere when
ranks could not link up."""

import pytest

from midstep.controller.events import DeadlinePassed
from midstep.controller.machine import RecoveryMachine
from midstep.controller.recovery.meeting import rendezvous
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import default_policy
from midstep.protocol.messages import NodeJoined, Rejoin, StartProcess, StoreMoved
from midstep.protocol.types import FaultKind, Rendezvous, StoreEndpoint

from .test_machine import Cluster

KEY = bytes(range(32))


def store(node: str) -> StoreEndpoint:
    return StoreEndpoint(f"host-of-{node}", 29400)


class Meetings(Cluster):
    """A cluster whose nodes have stores that can be told apart."""

    def __init__(self, key: bytes = KEY) -> None:
        super().__init__()
        self.machine = RecoveryMachine(default_policy(), self.job, rendezvous_key=key)

    def node(self, name: str) -> NodeJoined:
        return NodeJoined(name, name, store(name))

    def meet(self) -> Rendezvous:
        """Everybody has stopped: return where all are sent."""
        bodies: list[object] = []
        for rank in range(self.job.world_size):
            bodies += self.feed(self.quiesced(rank, 5, wards=[each for each in range(4) if each != rank]))
        [met] = {body.store for body in bodies if isinstance(body, Rejoin)}
        return met

    def fail_to_link_up(self, *ranks: int) -> None:
        """These ranks report it, and the time for a culprit passes."""
        self.feed(*(self.fault(rank, FaultKind.LINK_UP) for rank in ranks))
        self.now += 1.0
        self.feed(DeadlinePassed())
        assert self.machine.phase is Phase.QUIESCING


@pytest.fixture
def cluster() -> Meetings:
    """A running job of two nodes and a spare, in which a link has just broken."""
    running = Meetings()
    running.start()
    running.feed(running.fault(0, FaultKind.COMMUNICATION))
    running.now += 1.0
    running.feed(DeadlinePassed())
    return running


def test_after_a_failed_link_up_the_next_generation_meets_at_another_store(cluster: Meetings) -> None:
    """The spare's, too; and it stays where it was possible, also in later incidents."""
    hosts = [cluster.meet().host]
    for _ in range(3):
        cluster.fail_to_link_up(0, 1, 2, 3)
        hosts.append(cluster.meet().host)
    assert hosts == [store(name).host for name in ("node0", "node1", "node2", "node0")]
    cluster.pass_barrier_two(5)
    assert cluster.machine.state.world.best_store() is cluster.machine.state.world.nodes["node0"]


def test_however_many_ranks_report_it_a_link_up_has_failed_once(cluster: Meetings) -> None:
    """And whoever else is waited for after it."""
    cluster.meet()
    cluster.fail_to_link_up(0, 1, 2, 3)
    assert [node.failed_link_ups for node in cluster.machine.state.world.nodes.values()] == [1, 0, 0]


def test_a_store_that_was_started_again_must_show_first_that_it_serves(cluster: Meetings) -> None:
    """It may be stopped again as soon as it is there; where there is another one it is not tried."""
    cluster.meet()
    cluster.feed(StoreMoved("node0", store("node0")))
    cluster.fail_to_link_up(0)
    cluster.feed(StoreMoved("node0", store("node0")))
    assert cluster.meet().host == store("node1").host


def test_the_choice_holds_for_all_members_of_a_generation(cluster: Meetings) -> None:
    """A controller that takes over sends the orders again: to the same place, though link-ups have failed meanwhile."""
    met = cluster.meet()
    cluster.feed(cluster.fault(0, FaultKind.LINK_UP))
    assert rendezvous(cluster.machine.state) == met


def test_every_generation_and_every_job_has_another_secret(cluster: Meetings) -> None:
    secrets = [cluster.meet().secret]
    cluster.fail_to_link_up(0)
    secrets.append(cluster.meet().secret)
    other = Meetings(key=KEY[::-1])
    other.start()
    secrets.append(rendezvous(other.machine.state).secret)
    assert len({*secrets}) == 3
    assert all(len(secret) == 32 for secret in secrets)


def test_a_replay_comes_to_the_same_secrets() -> None:
    met = []
    for _ in range(2):
        cluster = Meetings()
        cluster.start()
        met.append(rendezvous(cluster.machine.state))
    assert met[0] == met[1]


def test_processes_that_start_together_are_told_the_same_place_and_secret() -> None:
    cluster = Meetings()
    bodies: list[object] = []
    for name in ("node0", "node1", "node2"):
        bodies += cluster.feed(cluster.node(name))
    starts = [body.store for body in bodies if isinstance(body, StartProcess)]
    assert len(starts) == 4
    assert len({*starts}) == 1
