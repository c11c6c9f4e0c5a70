"""Strikes: a rank that is wrong in votes again and again is moved to a spare, and its node is left."""

import msgspec
import pytest

from midstep.policies.schema import IntegrityPolicy, Policy
from midstep.protocol.faults import EACH_TIME
from midstep.protocol.messages import FaultReported, Quiesce, StartProcess
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, IntegrityAction, Rung
from midstep.testing.fake_cluster import FakeCluster, job, only

VOTING = IntegrityPolicy(every_steps=1, strikes=2, window_s=100.0)


def running(integrity: IntegrityPolicy = VOTING, spares: int = 1) -> FakeCluster:
    """Four ranks on two nodes."""
    cluster = FakeCluster(job(spares=spares), Policy(integrity=integrity))
    cluster.start()
    return cluster


def wrong(cluster: FakeCluster, rank: int) -> FaultReported:
    """A rank says that it was wrong, and lives."""
    return FaultReported(msgspec.structs.replace(cluster.fault(rank, FaultKind.ODD_COPY).report, mendable=True))


def mended(cluster: FakeCluster, rank: int, step: int = 5) -> Rung:
    """Have a rank be wrong once, and come back by a step that is repeated; return the rung."""
    cluster.feed(wrong(cluster, rank))
    rung = cluster.machine.incidents[-1].decisions[-1].rung
    if rung is Rung.RETRY_STEP:
        for each in range(4):
            cluster.feed(cluster.quiesced(each, step))
        cluster.pass_barrier_two(step)
    return rung


def test_a_rank_that_was_wrong_once_stays() -> None:
    """Its copy comes from others, and every process is kept."""
    cluster = running()
    bodies = cluster.feed(wrong(cluster, 1))
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 1, 2, 3]
    assert only(bodies, StartProcess) == []
    assert "strike 1 of 2 on node" in cluster.machine.incidents[-1].reports[0].detail


def test_a_rank_that_is_wrong_too_often_is_moved_and_its_node_left() -> None:
    """The node is named, and stays closed."""
    cluster = running()
    node = cluster.machine.state.world.holders[1].node
    assert mended(cluster, 1) is Rung.RETRY_STEP
    assert mended(cluster, 1) is Rung.RECOVER
    (fault,) = cluster.machine.status(cluster.now).faults
    assert (fault.report.kind, fault.report.node) == (FaultKind.ODD_COPY, node)
    assert cluster.machine.state.world.holders[1].node != node


def test_a_rank_that_computes_wrongly_each_time_is_moved_at_once() -> None:
    """It has been given its second chance within the step."""
    cluster = running()
    report = cluster.fault(1, FaultKind.WRONG_GRADIENT).report
    cluster.feed(FaultReported(msgspec.structs.replace(report, mendable=True, code=EACH_TIME)))
    assert cluster.machine.incidents[-1].decisions[-1].rung is Rung.RECOVER
    assert "the node is left" in cluster.machine.incidents[-1].reports[0].detail


def test_strikes_of_two_ranks_are_not_added_up() -> None:
    """Each computes on a device of its own."""
    cluster = running()
    assert [mended(cluster, rank) for rank in (1, 0)] == [Rung.RETRY_STEP, Rung.RETRY_STEP]


def test_strikes_are_forgotten_after_the_window() -> None:
    """A stray particle now and then moves no rank."""
    cluster = running()
    assert mended(cluster, 1) is Rung.RETRY_STEP
    cluster.now += 101.0
    assert mended(cluster, 1) is Rung.RETRY_STEP


def test_without_a_spare_the_rank_stays_and_the_report_says_so() -> None:
    """To stop the job would help less."""
    cluster = running(spares=0)
    assert [mended(cluster, 1) for _ in range(2)] == [Rung.RETRY_STEP, Rung.RETRY_STEP]
    assert "no spare node is there" in cluster.machine.incidents[-1].reports[0].detail


@pytest.mark.parametrize("assertion", [Assertion.OCCUR, Assertion.RECOVER])
def test_what_is_only_to_be_reported_stands_until_it_is_over(assertion: Assertion) -> None:
    """Training goes on."""
    cluster = running(IntegrityPolicy(every_steps=1, then=IntegrityAction.REPORT))
    report = cluster.fault(1, FaultKind.ODD_COPY).report
    noted = msgspec.structs.replace(report, level=FaultLevel.NOT_HANDLE, fault_id="odd", assertion=Assertion.OCCUR)
    assert cluster.feed(FaultReported(noted)) == []
    cluster.feed(FaultReported(msgspec.structs.replace(noted, assertion=assertion)))
    standing = cluster.machine.status(cluster.now).faults
    assert (len(standing), cluster.machine.incidents) == (1 if assertion is Assertion.OCCUR else 0, ())


def test_what_an_earlier_process_says_is_no_strike() -> None:
    """It was about another process, which is gone."""
    cluster = running()
    report = wrong(cluster, 1).report
    assert cluster.feed(FaultReported(msgspec.structs.replace(report, incarnation=report.incarnation + 1))) == []
    assert cluster.machine.state.accounts.strikes == []
