"""Faults of devices and nodes in the recovery machine: which are noted, which keep a node out, which are incidents."""

from pathlib import Path

import msgspec
import pytest

from midstep.controller.recovery.events import DeadlinePassed
from midstep.controller.recovery.fitness import FaultBook
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import TooOften
from midstep.protocol.messages import FaultReported, NodeLost, Quiesce, StartProcess, StopProcess
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, Rung
from midstep.testing.fake_cluster import FakeCluster, job, only

RESTARTS = (FaultLevel.RESTART_REQUEST, FaultLevel.RESTART_BUSINESS)
LEAVES = (
    FaultLevel.FREE_RESTART_NPU,
    FaultLevel.RESTART_NPU,
    FaultLevel.SEPARATE_NPU,
    FaultLevel.MANUALLY_SEPARATE_NPU,
)
NOTED = (FaultLevel.NOT_HANDLE, FaultLevel.PRE_SEPARATE_NPU)


def seen(
    cluster: FakeCluster,
    level: FaultLevel,
    node: str = "node0",
    device: int | None = 1,
    assertion: Assertion = Assertion.OCCUR,
    **fields: object,
) -> FaultReported:
    """What a detector says of a device (None: of the node)."""
    report = FaultReport(
        FaultKind.DEVICE, cluster.now, "detector/test", "", node=node, device=device, level=level, code="C1"
    )
    return FaultReported(msgspec.structs.replace(report, assertion=assertion, **fields))


def node_states(cluster: FakeCluster) -> dict[str, str]:
    """The state of each node, as status shows it."""
    return {node.node: node.state for node in cluster.machine.status(cluster.now).nodes}


def standing(cluster: FakeCluster) -> list[tuple[str | None, int | None, FaultLevel]]:
    """What status shows as standing."""
    faults = cluster.machine.status(cluster.now).faults
    return [(fault.report.node, fault.report.device, fault.report.level) for fault in faults]


@pytest.mark.parametrize("level", LEAVES)
def test_a_device_that_has_to_be_left_moves_the_ranks_of_its_node(cluster: FakeCluster, level: FaultLevel) -> None:
    bodies = cluster.feed(seen(cluster, level))
    assert [body.rank for body in only(bodies, Quiesce)] == [2, 3]
    assert [body.rank for body in only(bodies, StartProcess)] == [0, 1]
    assert node_states(cluster) == {"node0": "isolated", "node1": "active", "node2": "active"}
    (incident,) = cluster.machine.incidents
    assert incident.rung is Rung.RECOVER
    assert incident.reports[0].rank == 1


@pytest.mark.parametrize("level", NOTED)
def test_a_fault_that_asks_for_nothing_is_shown_and_nothing_is_done(cluster: FakeCluster, level: FaultLevel) -> None:
    assert cluster.feed(seen(cluster, level)) == []
    assert cluster.machine.incidents == ()
    assert standing(cluster) == [("node0", 1, level)]
    cluster.feed(seen(cluster, level, assertion=Assertion.RECOVER))
    assert standing(cluster) == []


@pytest.mark.parametrize("level", RESTARTS)
def test_a_passing_fault_ends_the_process_and_starts_the_next_one_when_the_device_is_well(
    cluster: FakeCluster, level: FaultLevel
) -> None:
    bodies = cluster.feed(seen(cluster, level))
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 2, 3]
    assert [body.rank for body in only(bodies, StopProcess)] == [1]
    assert not only(bodies, StartProcess)
    bodies = cluster.feed(seen(cluster, level, assertion=Assertion.RECOVER))
    assert [(body.rank, body.incarnation) for body in only(bodies, StartProcess)] == [(1, 2)]
    (incident,) = cluster.machine.incidents
    assert incident.rung is Rung.RECOVER_IN_PLACE
    assert cluster.holder(1).node == "node0"


def test_a_passing_fault_that_was_a_moments_restarts_at_once(cluster: FakeCluster) -> None:
    bodies = cluster.feed(seen(cluster, FaultLevel.RESTART_BUSINESS, assertion=Assertion.ONCE))
    assert [body.rank for body in only(bodies, StartProcess)] == [1]


def test_a_passing_fault_that_does_not_pass_in_time_leaves_the_node(cluster: FakeCluster) -> None:
    cluster.feed(seen(cluster, FaultLevel.RESTART_BUSINESS))
    due = cluster.machine.state.due.incident["devices"]
    assert due == pytest.approx(cluster.now + 15)
    cluster.feed(cluster.quiesced(0, 5), cluster.quiesced(2, 5), cluster.quiesced(3, 5, peers=[1]))
    cluster.now += 10
    assert not only(cluster.feed(DeadlinePassed()), StartProcess)
    cluster.now += 5
    bodies = cluster.feed(DeadlinePassed())
    assert [(body.rank, body.local_rank) for body in only(bodies, StartProcess)] == [(0, 0), (1, 1)]
    (incident,) = cluster.machine.incidents
    assert [decision.rung for decision in incident.decisions] == [Rung.RECOVER_IN_PLACE, Rung.RECOVER]
    reasons = {skipped.rung: skipped.reason for skipped in incident.decisions[-1].skipped}
    assert "RestartBusiness of the device of rank 1 still stands after 15 s" in reasons[Rung.RECOVER_IN_PLACE]


def test_a_passing_fault_that_is_old_is_not_mended_in_place(cluster: FakeCluster) -> None:
    cluster.feed(seen(cluster, FaultLevel.RESTART_BUSINESS, age_s=61.0))
    (incident,) = cluster.machine.incidents
    assert incident.rung is Rung.RECOVER
    assert "has stood for 61 s; up to 60 s a restart in place can mend it" in incident.decisions[0].reason


def test_a_device_without_a_rank_and_a_node_of_nobody_cause_no_incident(cluster: FakeCluster) -> None:
    assert cluster.feed(seen(cluster, FaultLevel.SEPARATE_NPU, device=7)) == []
    assert cluster.feed(seen(cluster, FaultLevel.SEPARATE_NPU, node="elsewhere")) == []
    assert cluster.machine.incidents == ()
    assert len(standing(cluster)) == 2


@pytest.mark.parametrize("level", [*RESTARTS, *LEAVES, FaultLevel.PRE_SEPARATE_NPU, FaultLevel.SUB_HEALTH])
def test_a_spare_with_a_standing_fault_is_not_chosen_and_is_again_when_it_has_recovered(
    cluster: FakeCluster, level: FaultLevel
) -> None:
    assert cluster.feed(seen(cluster, level, "node2")) == []
    assert node_states(cluster)["node2"] == "unfit"
    cluster.feed(NodeLost("node1", "gone", cluster.now))
    assert cluster.machine.incidents[-1].rung is not Rung.RECOVER
    assert all(cluster.holder(rank).node != "node2" for rank in range(4))
    cluster.feed(seen(cluster, level, "node2", assertion=Assertion.RECOVER))
    assert node_states(cluster)["node2"] != "unfit"


def test_a_spare_is_unfit_as_long_as_one_of_its_faults_stands(cluster: FakeCluster) -> None:
    cluster.feed(seen(cluster, FaultLevel.SEPARATE_NPU, "node2", 0), seen(cluster, FaultLevel.RESTART_NPU, "node2", 1))
    cluster.feed(seen(cluster, FaultLevel.SEPARATE_NPU, "node2", 0, Assertion.RECOVER))
    assert node_states(cluster)["node2"] == "unfit"
    cluster.feed(seen(cluster, FaultLevel.RESTART_NPU, "node2", 1, Assertion.RECOVER))
    assert node_states(cluster)["node2"] == "spare"


def test_a_fault_that_was_known_before_its_node_came_keeps_ranks_off_it() -> None:
    fresh = FakeCluster(job(spares=1))
    fresh.feed(fresh.node("node0"))
    fresh.feed(seen(fresh, FaultLevel.SEPARATE_NPU, "node1"))
    fresh.feed(fresh.node("node1"), fresh.node("node2"), fresh.node("node3"))
    assert {fresh.holder(rank).node for rank in range(4)} == {"node0", "node2"}


def test_a_node_before_its_separation_keeps_its_processes_and_gets_no_new_one(cluster: FakeCluster) -> None:
    cluster.feed(seen(cluster, FaultLevel.PRE_SEPARATE_NPU))
    cluster.expect(Phase.RUNNING)
    cluster.feed(cluster.exited(0))
    (incident,) = cluster.machine.incidents
    assert incident.rung is Rung.RECOVER
    assert cluster.holder(0).node == cluster.holder(1).node == "node2"
    reasons = {skipped.rung: skipped.reason for skipped in incident.decisions[0].skipped}
    assert "node node0 is to get no new process: PreSeparateNPU C1 of device 1" in reasons[Rung.RECOVER_IN_PLACE]


def test_a_failure_elsewhere_does_not_make_ranks_leave_a_node_before_its_separation(cluster: FakeCluster) -> None:
    cluster.feed(seen(cluster, FaultLevel.PRE_SEPARATE_NPU))
    bodies = cluster.feed(cluster.exited(3))
    assert [body.rank for body in only(bodies, StartProcess)] == [3]
    assert cluster.machine.incidents[0].rung is Rung.RECOVER_IN_PLACE


def test_a_fault_of_a_whole_node_is_one_of_all_its_ranks(cluster: FakeCluster) -> None:
    bodies = cluster.feed(seen(cluster, FaultLevel.SEPARATE_NPU, device=None, kind=FaultKind.NODE))
    assert [body.rank for body in only(bodies, StartProcess)] == [0, 1]


def test_what_is_said_twice_is_one_incident_and_what_gets_worse_is_news(cluster: FakeCluster) -> None:
    cluster.feed(seen(cluster, FaultLevel.NOT_HANDLE), seen(cluster, FaultLevel.NOT_HANDLE))
    assert standing(cluster) == [("node0", 1, FaultLevel.NOT_HANDLE)]
    assert cluster.machine.status(cluster.now).faults[0].times == 2
    cluster.feed(seen(cluster, FaultLevel.SEPARATE_NPU))
    cluster.feed(seen(cluster, FaultLevel.SEPARATE_NPU))
    (incident,) = cluster.machine.incidents
    assert len(incident.decisions) == 1
    assert standing(cluster) == [("node0", 1, FaultLevel.SEPARATE_NPU)]


def test_two_detectors_that_see_the_same_are_two_entries_and_each_recovers_its_own(cluster: FakeCluster) -> None:
    one, other = (seen(cluster, FaultLevel.SEPARATE_NPU, "node2", seen_by=f"detector/{name}") for name in "ab")
    cluster.feed(one, other)
    cluster.feed(FaultReported(msgspec.structs.replace(one.report, assertion=Assertion.RECOVER)))
    assert node_states(cluster)["node2"] == "unfit"
    cluster.feed(FaultReported(msgspec.structs.replace(other.report, assertion=Assertion.RECOVER)))
    assert node_states(cluster)["node2"] == "spare"


def test_what_comes_too_often_on_one_device_is_separated_until_a_person_has_looked() -> None:
    book = FaultBook(2, (TooOften(codes=("C1",), times=3, window_s=100.0),))
    report = FaultReport(
        FaultKind.DEVICE, 0.0, "d", "", node="n", device=0, level=FaultLevel.RESTART_BUSINESS, code="c1"
    )
    levels = []
    for at_s in (0.0, 50.0, 60.0, 300.0):
        levels.append(book.enter(report, at_s)[0].level)
        book.clear(report)
    assert levels == [
        FaultLevel.RESTART_BUSINESS,
        FaultLevel.RESTART_BUSINESS,
        FaultLevel.MANUALLY_SEPARATE_NPU,
        FaultLevel.RESTART_BUSINESS,
    ]
    elsewhere = msgspec.structs.replace(report, device=1)
    assert book.enter(elsewhere, 61.0)[0].level is FaultLevel.RESTART_BUSINESS


def test_what_two_detectors_tell_of_one_event_has_come_once() -> None:
    """As the kernel's log and `npu-smi` do. What one of them tells again is another event."""
    book = FaultBook(2, (TooOften(codes=("C1",), times=3, window_s=1000.0),))
    report = FaultReport(FaultKind.DEVICE, 0.0, "log", "", node="n", device=0, level=FaultLevel.RESTART_NPU, code="C1")
    told = [("log", 0.0), ("smi", 4.0), ("log", 10.0), ("smi", 14.0), ("smi", 100.0), ("log", 104.0)]
    levels = []
    for seen_by, at_s in told:
        each = msgspec.structs.replace(report, seen_by=seen_by)
        levels.append(book.enter(each, at_s)[0].level)
        book.clear(each)
    assert [level is FaultLevel.MANUALLY_SEPARATE_NPU for level in levels] == [False] * 4 + [True, True]


def test_a_code_with_two_rules_is_counted_once() -> None:
    rules = (TooOften(codes=("C1",), times=3, window_s=1000.0), TooOften(codes=("C1",), times=2, window_s=10.0))
    book = FaultBook(2, rules)
    report = FaultReport(FaultKind.DEVICE, 0.0, "d", "", node="n", device=0, level=FaultLevel.RESTART_NPU, code="C1")
    levels = []
    for at_s in (0.0, 50.0, 55.0):
        levels.append(book.enter(report, at_s)[0].level)
        book.clear(report)
    assert levels == [FaultLevel.RESTART_NPU, FaultLevel.RESTART_NPU, FaultLevel.MANUALLY_SEPARATE_NPU]


def test_a_fault_book_is_bounded() -> None:
    book = FaultBook(2)
    report = FaultReport(FaultKind.DEVICE, 0.0, "d", "", level=FaultLevel.RESTART_NPU, assertion=Assertion.OCCUR)
    for number in range(10_050):
        book.enter(msgspec.structs.replace(report, node=f"node{number}", seen_by=f"d{number % 3}"), 0.0)
    assert len(book.standing()) == 10_000
    assert book.standing()[-1].report.node == "node10049"


def test_a_recovery_of_what_nobody_knows_changes_nothing(cluster: FakeCluster) -> None:
    assert cluster.feed(seen(cluster, FaultLevel.RESTART_NPU, assertion=Assertion.RECOVER)) == []
    assert cluster.machine.status(cluster.now).refused == {"recovery of a fault that is not known": 1}


def documented_levels() -> dict[str, str]:
    """The table of docs/faults.md: the rung of each level."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[3].strip("`") for row in rows if len(row) == 4}


@pytest.mark.parametrize("level", sorted(set(FaultLevel) - {FaultLevel.SOFTWARE, FaultLevel.NODE}))
def test_the_docs_tell_the_rung_that_each_level_takes(cluster: FakeCluster, level: FaultLevel) -> None:
    cluster.feed(seen(cluster, level))
    taken = [decision.rung.value for incident in cluster.machine.incidents for decision in incident.decisions]
    assert documented_levels()[level.value] == (taken[0] if taken else "none")
