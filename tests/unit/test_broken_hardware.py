"""Faults that ask for a node to be left are dealt with whenever they come; strays of orders out of order end."""

import math

import msgspec
import pytest

from midstep.controller.recovery.events import DeadlinePassed
from midstep.controller.recovery.state import Phase
from midstep.policies.fault_codes import Treatment
from midstep.policies.schema import Policy, RungPolicy
from midstep.protocol.messages import FaultReported, NodeLost, ProcessStarted, StartProcess, StopProcess
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, Rung, RunningProcess
from midstep.testing.fake_cluster import FakeCluster, job, only

from .test_scaling import lose, scaling


def broken(cluster: FakeCluster, node: str, assertion: Assertion = Assertion.OCCUR) -> FaultReported:
    """A detector says that the first device of a node is to be separated, or is well again."""
    return FaultReported(
        FaultReport(
            FaultKind.DEVICE, cluster.now, "detector/files", "", node=node, device=0, level=FaultLevel.SEPARATE_NPU,
            code="A1", assertion=assertion,
        )
    )  # fmt: skip


def waiting() -> FakeCluster:
    """A job of two nodes that has lost one, and waits for its replacement."""
    ladder = (RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP))
    cluster = FakeCluster(job(spares=0), Policy(ladder=ladder, save_before_reschedule=False), creates=True)
    cluster.start()
    cluster.feed(NodeLost("node1", "gone", cluster.now))
    cluster.expect(Phase.WAITING)
    return cluster


def test_a_node_that_breaks_while_another_is_waited_for_is_left_when_the_world_starts() -> None:
    """It was reported once, and is not forgotten until then."""
    cluster = waiting()
    assert cluster.feed(broken(cluster, "node0")) == []
    cluster.feed(cluster.node("node2"))
    cluster.expect(Phase.STARTING)
    assert cluster.machine.next_deadline() == -math.inf, "no answer is waited for"
    cluster.feed(DeadlinePassed())
    decision = cluster.machine.incidents[-1].decisions[-1]
    assert decision.rung is Rung.RESCHEDULE_POD
    assert "node0" in decision.reason
    assert cluster.machine.state.world.nodes["node0"].given_back


def test_a_node_that_was_given_back_is_told_nothing_when_it_joins_once_more() -> None:
    """The platform was told to end it."""
    cluster = waiting()
    cluster.feed(broken(cluster, "node0"), cluster.node("node2"), DeadlinePassed())
    assert cluster.machine.state.world.nodes["node0"].given_back
    cluster.feed(NodeLost("node0", "deleted", cluster.now))
    assert cluster.feed(cluster.node("node0")) == []


def test_a_node_that_is_well_again_before_the_world_starts_is_used() -> None:
    cluster = waiting()
    cluster.feed(broken(cluster, "node0"), broken(cluster, "node0", Assertion.RECOVER))
    cluster.feed(cluster.node("node2"))
    decisions = len(cluster.machine.incidents[-1].decisions)
    assert cluster.feed(DeadlinePassed()) == []
    assert len(cluster.machine.incidents[-1].decisions) == decisions
    assert not cluster.machine.state.world.nodes["node0"].given_back


def test_a_node_that_breaks_while_the_world_is_saved_to_get_smaller_is_not_forgotten() -> None:
    cluster = scaling()
    lose(cluster)
    cluster.feed(broken(cluster, "node0"))
    cluster.feed(cluster.quiesced(0, 5, peers=[2]), cluster.quiesced(1, 5, peers=[3]))
    cluster.feed(cluster.saved(1), cluster.saved(0))
    cluster.expect(Phase.STARTING)
    cluster.feed(DeadlinePassed())
    assert "node0" in cluster.machine.incidents[-1].decisions[-1].reason
    assert len(cluster.machine.incidents[-1].decisions) > 1


@pytest.mark.parametrize("life", [0, 1])
def test_a_device_that_is_reported_after_its_process_was_restarted_is_left(life: int) -> None:
    """The process died of it first; whether the report names that life does not matter to the device."""
    cluster = FakeCluster(job())
    cluster.start()
    cluster.feed(cluster.exited(2))
    assert cluster.holder(2).incarnation == 2
    report = msgspec.structs.replace(broken(cluster, "node1").report, rank=2, incarnation=life)
    bodies = cluster.feed(FaultReported(report))
    assert cluster.machine.incidents[-1].rung is Rung.RECOVER
    assert {start.rank for start in only(bodies, StartProcess)} == {2, 3}
    assert {cluster.holder(rank).node for rank in (2, 3)} == {"node2"}


def test_a_device_that_is_reported_with_a_rank_that_has_moved_is_a_fault_of_the_rank_that_is_there_now() -> None:
    """The world got smaller while the report was on its way: node1 has ranks 0 and 1 now."""
    cluster = scaling()
    report = msgspec.structs.replace(broken(cluster, "node1").report, rank=2, incarnation=1)
    lose(cluster, "node0")
    cluster.feed(cluster.quiesced(2, 5, peers=[0]), cluster.quiesced(3, 5, peers=[1]))
    cluster.feed(cluster.saved(3), cluster.saved(2))
    cluster.expect(Phase.STARTING)
    assert {cluster.holder(rank).node for rank in (0, 1)} == {"node1"}
    cluster.feed(FaultReported(report))
    assert cluster.machine.incidents[-1].reports[-1].rank == 0


def test_a_process_that_starts_after_it_was_told_to_end_is_told_again() -> None:
    """On its way the order to end it may overtake the one to start it, and finds nobody to end."""
    cluster = FakeCluster(job())
    cluster.start()
    cluster.feed(cluster.exited(2))
    late = RunningProcess(2, 999, 1, 1)
    assert cluster.feed(ProcessStarted("node1", late, warm=True)) == [StopProcess(2, 1, grace_s=0.0)]
    nobody = RunningProcess(7, 999, 1, 1)
    assert cluster.feed(ProcessStarted("node1", nobody, warm=True)) == [StopProcess(7, 1, grace_s=0.0)]


@pytest.mark.parametrize("domain", ["host7", "node1"])
def test_a_fault_finds_its_node_by_the_name_of_the_host_that_it_is_alone_on(domain: str) -> None:
    """Detectors know hosts as the cluster names them; agents call theirs their failure domain."""
    cluster = FakeCluster(job(spares=0), creates=True)
    for name, host in (("node0", "host3"), ("node1", domain)):
        cluster.feed(msgspec.structs.replace(cluster.node(name), failure_domain=host))
    cluster.feed(broken(cluster, domain))
    (fault,) = cluster.machine.state.book.on("node1", frozenset(Treatment))
    assert fault.node == "node1"


def test_a_fault_of_a_rack_is_of_no_node_in_particular() -> None:
    cluster = FakeCluster(job(spares=0), creates=True)
    for name in ("node0", "node1"):
        cluster.feed(msgspec.structs.replace(cluster.node(name), failure_domain="rack1"))
    cluster.feed(broken(cluster, "rack1"))
    assert not any(cluster.machine.state.book.on(name, frozenset(Treatment)) for name in ("node0", "node1"))
