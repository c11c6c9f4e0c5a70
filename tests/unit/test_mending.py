"""Faults that a process can mend itself: it stays, gets back what it lost, and is replaced when that fails."""

from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import DeadlinePassed
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Budget, Deadlines, NodePolicy, Policy, RungPolicy
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import FaultReported, ProcessStarted, Quiesce, Rejoin, StartProcess
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, Rung, RunningProcess
from midstep.testing.fake_cluster import FakeCluster, job, only

from .test_policies_ladder import LADDER, facts_of, fault, refusal


def struck(cluster: FakeCluster, rank: int, kind: FaultKind = FaultKind.MEMORY, **changes: Any) -> FaultReported:
    """A rank says that it was hit, and lives."""
    report = msgspec.structs.replace(cluster.fault(rank, kind).report, mendable=True, **changes)
    return FaultReported(report)


def running(policy: Policy | None = None) -> FakeCluster:
    """Four ranks on two nodes, a spare."""
    cluster = FakeCluster(job(), policy)
    cluster.start()
    return cluster


def rungs(cluster: FakeCluster) -> list[Rung]:
    """What was taken in the last incident."""
    return [decision.rung for decision in cluster.machine.incidents[-1].decisions]


def test_the_struck_rank_keeps_its_process_and_the_step_is_repeated() -> None:
    cluster = running()
    bodies = cluster.feed(struck(cluster, 1))
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 1, 2, 3]
    assert only(bodies, StartProcess) == []
    decision = cluster.machine.incidents[0].decisions[0]
    assert decision.rung is Rung.RETRY_STEP
    assert decision.reason == (
        "rank 1 had an uncorrectable memory error, rank 1 keeps its process and mends it there: the step is repeated, "
        "keeping 4 processes alive"
    )
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5))
    lost = cluster.quiesced(1, 5)
    bodies = cluster.feed(msgspec.structs.replace(lost, report=msgspec.structs.replace(lost.report, holds=())))
    moves = {body.rank: body.part.transfers for body in only(bodies, Rejoin)}
    assert [move.destination for move in moves[1]] == [1]
    cluster.pass_barrier_two(5)
    (incident,) = cluster.machine.incidents
    assert (incident.outcome, incident.replaced, incident.steps_lost) == (Outcome.RESUMED, (), 0)
    assert incident.healthy_pids_kept


def test_a_rank_that_is_struck_again_after_it_mended_itself_is_started_anew() -> None:
    """The failed rung hands over to the next one, which says why."""
    cluster = running()
    cluster.feed(struck(cluster, 1))
    for rank in range(4):
        cluster.feed(cluster.quiesced(rank, 5))
    bodies = cluster.feed(struck(cluster, 1))
    assert [body.rank for body in only(bodies, StartProcess)] == [1]
    assert rungs(cluster) == [Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE]
    reason = cluster.machine.incidents[0].decisions[1].skipped[0].reason
    assert "failed before in this incident: memory again in rank 1, which had mended itself" in reason


def test_a_retry_that_cannot_link_up_hands_over_to_the_next_rung_for_the_rank_that_was_struck() -> None:
    cluster = running()
    cluster.feed(struck(cluster, 1))
    for _ in range(5):
        for rank in range(4):
            cluster.feed(cluster.quiesced(rank, 5))
        cluster.expect(Phase.REJOINING)
        cluster.feed(cluster.fault(0, FaultKind.LINK_UP))
        cluster.now += 1
        bodies = cluster.feed(DeadlinePassed())
    assert rungs(cluster) == [Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE]
    assert [body.rank for body in only(bodies, StartProcess)] == [1]


def test_a_struck_rank_that_does_not_answer_is_started_anew() -> None:
    cluster = running()
    cluster.feed(struck(cluster, 1))
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 5))
    cluster.now += 11
    bodies = cluster.feed(DeadlinePassed())
    assert [body.rank for body in only(bodies, StartProcess)] == [1]
    assert rungs(cluster)[-1] is Rung.RECOVER_IN_PLACE


def test_in_one_incident_one_rank_mends_itself_one_restarts_in_place_and_a_node_is_left() -> None:
    cluster = FakeCluster(job(nodes=3))
    cluster.start()
    cluster.feed(struck(cluster, 0))
    bodies = cluster.feed(cluster.exited(2))
    assert [body.rank for body in only(bodies, StartProcess)] == [2]
    assert rungs(cluster) == [Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE]
    broken = cluster.fault(4, FaultKind.DEVICE).report
    report = msgspec.structs.replace(broken, level=FaultLevel.SEPARATE_NPU)
    bodies = cluster.feed(FaultReported(report))
    assert {body.rank for body in only(bodies, StartProcess)} == {4, 5}
    assert {body.rank: body.rank for body in only(bodies, StartProcess)}.keys().isdisjoint({0, 1})
    cluster.recover(5)
    incident = cluster.machine.incidents[0]
    assert incident.replaced == (2, 4, 5)
    assert incident.healthy_pids_kept


def test_what_several_ranks_can_mend_at_once_is_one_recovery() -> None:
    """A link has two ends."""
    cluster = running()
    cluster.feed(struck(cluster, 1, FaultKind.LINK))
    cluster.feed(struck(cluster, 2, FaultKind.LINK))
    assert set(rungs(cluster)) == {Rung.RETRY_STEP}
    cluster.recover(5)
    budgets = {use.name: use.used for use in cluster.machine.status(cluster.now).budgets}
    assert budgets["retry_step per job"] == 1


def test_mending_is_limited_per_rank_and_the_reason_names_it() -> None:
    policy = Policy(
        ladder=(
            RungPolicy(Rung.RETRY_STEP, budget=Budget(per_rank=1)),
            RungPolicy(Rung.RECOVER_IN_PLACE),
            RungPolicy(Rung.STOP),
        )
    )
    cluster = running(policy)
    cluster.feed(struck(cluster, 1))
    cluster.recover(5)
    cluster.feed(struck(cluster, 1))
    decision = cluster.machine.incidents[-1].decisions[0]
    assert decision.rung is Rung.RECOVER_IN_PLACE
    assert "retry_step: budget per_rank of rank 1 is spent: 1 of 1" in decision.skipped[0].reason


def test_a_node_whose_memory_is_struck_too_often_is_left() -> None:
    cluster = running(Policy(node=NodePolicy(failures=1)))
    cluster.feed(struck(cluster, 1))
    cluster.recover(5)
    cluster.feed(struck(cluster, 0))
    assert rungs(cluster) == [Rung.RECOVER]
    assert "node node0 has had 2 failures" in cluster.machine.incidents[-1].decisions[0].reason


def test_a_process_that_has_not_reached_its_train_function_is_started_anew() -> None:
    """There is nothing in it to be mended."""
    cluster = running()
    cluster.feed(cluster.exited(1))
    bodies = cluster.feed(struck(cluster, 1))
    assert [body.rank for body in only(bodies, StartProcess)] == [1]


def test_a_fault_that_needs_another_device_is_not_mended_whatever_the_process_says() -> None:
    hit = msgspec.structs.replace(fault(FaultKind.MEMORY, 2, level=FaultLevel.RESTART_NPU), mendable=True)
    facts = msgspec.structs.replace(facts_of(hit), culprits=(), mendable=(2,))
    assert LADDER.decide(facts).rung is Rung.RECOVER
    assert "RestartNPU" in refusal(facts, Rung.RETRY_STEP)


def test_a_world_in_which_every_rank_mends_itself_keeps_all_processes() -> None:
    hits = [FaultReport(FaultKind.LINK, 1.0, "test", "", rank, mendable=True) for rank in range(4)]
    facts = msgspec.structs.replace(facts_of(*hits), culprits=(), mendable=(0, 1, 2, 3), healthy=frozenset())
    decision = LADDER.decide(facts)
    assert decision.rung is Rung.RETRY_STEP
    assert "keep their processes and mend them there" in decision.reason


def seen_from_outside(
    cluster: FakeCluster, rank: int, level: FaultLevel = FaultLevel.RESTART_BUSINESS
) -> FaultReported:
    """The cluster's own report of struck memory: on a device, without a process."""
    node = cluster.holder(rank).node
    return FaultReported(
        FaultReport(
            FaultKind.MEMORY, cluster.now, "detector/files", "UCE", node=node, device=rank % 2, level=level,
            code="80E01801", fault_id=f"{cluster.now}", assertion=Assertion.OCCUR,
        )
    )  # fmt: skip


def test_a_detector_that_sees_struck_memory_first_is_not_acted_on_before_the_process_has_spoken() -> None:
    """One fault, two reports, one recovery: by the rung that the process can mend it with."""
    cluster = running()
    assert cluster.feed(seen_from_outside(cluster, 1)) == []
    cluster.expect(Phase.SUSPECTING)
    bodies = cluster.feed(struck(cluster, 1))
    assert only(bodies, StartProcess) == []
    assert rungs(cluster) == [Rung.RETRY_STEP]
    assert [report.seen_by for report in cluster.machine.incidents[0].reports] == ["detector/files", "rank/1"]
    cluster.recover(5)
    assert cluster.machine.incidents[0].replaced == ()


def test_a_process_that_says_nothing_of_its_struck_memory_is_started_anew_after_a_short_wait() -> None:
    """No longer than a step, and the time in which reports that belong together arrive."""
    cluster = running()
    reported_s = cluster.now
    cluster.feed(seen_from_outside(cluster, 1))
    due_s = cluster.machine.next_deadline()
    assert due_s is not None
    assert reported_s < due_s <= reported_s + 0.3 + 0.1 + 0.01
    cluster.now = due_s
    bodies = cluster.feed(DeadlinePassed())
    assert [body.rank for body in only(bodies, StartProcess)] == []  # it waits for its device
    assert rungs(cluster) == [Rung.RECOVER_IN_PLACE]
    assert cluster.machine.incidents[0].reports[0].code == "80E01801"


@pytest.mark.parametrize("over", [False, True])
def test_a_detector_that_sees_struck_memory_after_the_process_changes_nothing(over: bool) -> None:
    """While it is being mended, and when it has been."""
    cluster = running()
    cluster.feed(struck(cluster, 1))
    if over:
        cluster.recover(5)
    assert cluster.feed(seen_from_outside(cluster, 1)) == []
    if not over:
        cluster.recover(5)
    cluster.expect(Phase.RUNNING)
    assert rungs(cluster) == [Rung.RETRY_STEP]
    assert cluster.machine.status(cluster.now).refused == {
        "fault of memory that its process has reported, or that is older than it": 1
    }


@pytest.mark.parametrize("start_is_told", [True, False])
def test_what_struck_the_memory_of_an_earlier_process_is_not_the_next_ones_fault(start_is_told: bool) -> None:
    """A detector's report may come late, e.g. because there was no controller to take it, nor word of the start."""
    cluster = running()
    report = seen_from_outside(cluster, 1)
    cluster.feed(cluster.exited(1))
    if start_is_told:
        process = RunningProcess(1, 201, cluster.holder(1).incarnation, cluster.machine.generation)
        cluster.feed(ProcessStarted(cluster.holder(1).node, process, warm=True))
    cluster.recover(5)
    assert cluster.feed(report) == []
    cluster.expect(Phase.RUNNING)


def test_a_process_that_dies_of_its_struck_memory_is_not_waited_for() -> None:
    cluster = running()
    cluster.feed(seen_from_outside(cluster, 1))
    cluster.feed(cluster.exited(1))
    assert rungs(cluster) == [Rung.RECOVER_IN_PLACE]
    cluster.expect(Phase.QUIESCING)


def test_a_device_that_is_to_be_left_for_its_memory_is_left_at_once() -> None:
    cluster = running()
    cluster.feed(seen_from_outside(cluster, 1, FaultLevel.SEPARATE_NPU))
    assert rungs(cluster) == [Rung.RECOVER]


def test_a_broken_collective_does_not_wait_for_the_word_about_memory() -> None:
    """The time of the shorter wait counts."""
    cluster = running(Policy(deadlines=Deadlines(suspect_s=0.05)))
    cluster.machine.state.progress.median_step_s = 5.0
    cluster.feed(seen_from_outside(cluster, 1))
    cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION))
    due_s = cluster.machine.next_deadline()
    assert due_s is not None
    assert due_s <= cluster.now + 0.06
