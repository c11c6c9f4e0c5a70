"""Which rung is taken, what it replaces, what it costs, and what is said about the others."""

import msgspec
import pytest

from midstep.policies.budgets import Facts, FailedRung, Spent
from midstep.policies.ladder import Ladder
from midstep.policies.schema import Budget, IncidentPolicy, Policy, RungPolicy, default_policy
from midstep.protocol.types import FaultKind, FaultLevel, FaultReport, Rung

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}
LADDER = Ladder(default_policy())


def fault(
    kind: FaultKind = FaultKind.EXIT,
    rank: int | None = None,
    node: str | None = None,
    level: FaultLevel = FaultLevel.SOFTWARE,
) -> FaultReport:
    return FaultReport(kind=kind, at_s=100.0, seen_by="test", detail="", rank=rank, node=node, level=level)


def facts_of(*faults: FaultReport, **changes: object) -> Facts:
    """Facts of four ranks on nodes a and b with spare s; culprits are the ranks of the faults and of lost nodes."""
    lost = {report.node for report in faults if report.kind is FaultKind.NODE_LOST and report.node}
    links = {FaultKind.COMMUNICATION, FaultKind.LINK_UP}
    culprits = {report.rank for report in faults if report.rank is not None and report.kind not in links}
    culprits |= {rank for rank, node in NODES.items() if node in lost}
    facts = Facts(
        now=1000.0,
        faults=faults,
        culprits=tuple(sorted(culprits)),
        nodes=NODES,
        healthy=frozenset(NODES) - culprits,
        nodes_lost=frozenset(lost),
        spare_nodes=("s",),
        can_create_nodes=True,
    )
    return msgspec.structs.replace(facts, **changes)


def refusal(facts: Facts, rung: Rung, ladder: Ladder = LADDER) -> str:
    """The reason why `rung` was skipped."""
    (reason,) = [skipped.reason for skipped in ladder.decide(facts).skipped if skipped.rung is rung]
    return reason


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.EXCEPTION,
        FaultKind.EXIT,
        FaultKind.STALL,
        FaultKind.UNRESPONSIVE,
        FaultKind.CORRUPTION,
        FaultKind.START_FAILED,
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_software_fault_restarts_only_its_process_in_place_rank_0_included(kind: FaultKind, rank: int) -> None:
    facts = facts_of(fault(kind, rank))
    decision = LADDER.decide(facts)
    assert decision.rung is Rung.RECOVER_IN_PLACE
    assert f"rank {rank}" in decision.reason
    assert LADDER.course(facts, decision.rung).replace == (rank,)
    assert LADDER.course(facts, decision.rung).leave == ()


@pytest.mark.parametrize(
    ("level", "rung"),
    [
        (FaultLevel.RESTART_REQUEST, Rung.RECOVER_IN_PLACE),
        (FaultLevel.RESTART_BUSINESS, Rung.RECOVER_IN_PLACE),
        (FaultLevel.FREE_RESTART_NPU, Rung.RECOVER),
        (FaultLevel.RESTART_NPU, Rung.RECOVER),
        (FaultLevel.SEPARATE_NPU, Rung.RECOVER),
        (FaultLevel.PRE_SEPARATE_NPU, Rung.RECOVER),
        (FaultLevel.SUB_HEALTH, Rung.RECOVER),
        (FaultLevel.NODE, Rung.RECOVER),
    ],
)
def test_only_two_device_levels_are_mended_in_place(level: FaultLevel, rung: Rung) -> None:
    facts = facts_of(fault(FaultKind.DEVICE, 2, level=level))
    assert LADDER.decide(facts).rung is rung
    if rung is Rung.RECOVER:
        assert level in refusal(facts, Rung.RECOVER_IN_PLACE)


@pytest.mark.parametrize("kind", [FaultKind.COMMUNICATION, FaultKind.LINK_UP])
def test_a_failed_link_with_nobody_at_fault_replaces_nobody(kind: FaultKind) -> None:
    facts = facts_of(fault(kind, 1))
    assert LADDER.decide(facts).rung is Rung.RETRY_STEP
    assert LADDER.course(facts, Rung.RETRY_STEP).replace == ()
    assert LADDER.decide(facts).skipped == ()


def test_a_stall_with_nobody_at_fault_repeats_the_step_since_nothing_is_lost() -> None:
    facts = facts_of(fault(FaultKind.STALL), culprits=(), healthy=frozenset(NODES))
    assert LADDER.decide(facts).rung is Rung.RETRY_STEP


def test_a_lost_node_moves_its_ranks_to_the_spare() -> None:
    facts = facts_of(fault(FaultKind.NODE_LOST, node="b", level=FaultLevel.NODE))
    assert LADDER.decide(facts).rung is Rung.RECOVER
    assert LADDER.course(facts, Rung.RECOVER).leave == ("b",)
    assert LADDER.course(facts, Rung.RECOVER).replace == (2, 3)
    assert "node b is lost" in refusal(facts, Rung.RECOVER_IN_PLACE)


def test_the_report_of_a_lost_node_is_enough_before_the_world_has_marked_it() -> None:
    facts = facts_of(fault(FaultKind.NODE_LOST, node="b"), nodes_lost=frozenset())
    assert LADDER.decide(facts).rung is Rung.RECOVER
    assert LADDER.course(facts, Rung.RECOVER).leave == ("b",)


def test_a_healthy_neighbour_moves_with_the_device_fault_of_its_node() -> None:
    facts = facts_of(fault(FaultKind.DEVICE, 2, level=FaultLevel.RESTART_NPU))
    assert LADDER.course(facts, Rung.RECOVER).replace == (2, 3)


def test_one_recovery_restarts_some_in_place_and_moves_others_and_charges_both() -> None:
    facts = facts_of(fault(FaultKind.EXIT, 0), fault(FaultKind.NODE_LOST, node="b"))
    decision = LADDER.decide(facts)
    assert decision.rung is Rung.RECOVER
    assert "in place: rank 0" in decision.reason
    assert LADDER.course(facts, Rung.RECOVER).leave == ("b",)
    assert LADDER.course(facts, Rung.RECOVER).replace == (0, 2, 3)
    assert LADDER.course(facts, Rung.RECOVER).cost == (
        Spent(Rung.RECOVER, 1000.0, (2, 3), ("b",)),
        Spent(Rung.RECOVER_IN_PLACE, 1000.0, (0,), ("a",)),
    )


def test_a_fault_report_about_a_node_that_was_left_already_blames_no_other_node() -> None:
    facts = facts_of(fault(FaultKind.NODE_LOST, rank=2, node="gone"), culprits=(2,), nodes_lost=frozenset({"gone"}))
    assert LADDER.decide(facts).rung is Rung.RECOVER_IN_PLACE


def test_without_a_spare_the_ranks_of_a_lost_node_wait_for_the_platform() -> None:
    """Where it creates nodes, or has promised one; the healthy ranks are parked meanwhile."""
    facts = facts_of(fault(FaultKind.NODE_LOST, node="b"), spare_nodes=())
    decision = LADDER.decide(facts)
    assert decision.rung is Rung.RECOVER
    assert "move from node b to 1 node that the platform brings" in decision.reason
    assert LADDER.course(facts, Rung.RECOVER).leave == ("b",)
    fixed = msgspec.structs.replace(facts, can_create_nodes=False)
    assert "no spare node" in refusal(fixed, Rung.RECOVER)
    assert LADDER.decide(msgspec.structs.replace(fixed, promised_nodes=1)).rung is Rung.RECOVER


def test_without_spare_and_platform_a_lost_node_ends_the_job_and_the_reason_says_so() -> None:
    facts = facts_of(fault(FaultKind.NODE_LOST, node="b"), spare_nodes=(), can_create_nodes=False)
    decision = LADDER.decide(facts)
    assert decision.rung is Rung.STOP
    assert "no spare node" in decision.reason
    assert "cannot create nodes" in decision.reason


def test_two_lost_nodes_need_two_spares() -> None:
    nodes = {**NODES, 4: "c"}
    reports = (fault(FaultKind.NODE_LOST, node="a"), fault(FaultKind.NODE_LOST, node="b"))
    facts = facts_of(*reports, nodes=nodes, healthy=frozenset({4}), can_create_nodes=False)
    assert LADDER.decide(facts).rung is Rung.STOP
    assert "only 1 spare node" in refusal(facts, Rung.RECOVER)
    enough = msgspec.structs.replace(facts, spare_nodes=("s", "t"))
    assert LADDER.decide(enough).rung is Rung.RECOVER


def test_after_a_failed_restart_in_place_the_node_of_the_culprit_is_left() -> None:
    failed = (FailedRung(Rung.RECOVER_IN_PLACE, "rank 1 never joined"),)
    facts = facts_of(fault(FaultKind.START_FAILED, 1), failed=failed, taken=(Rung.RECOVER_IN_PLACE,))
    assert LADDER.decide(facts).rung is Rung.RECOVER
    assert LADDER.course(facts, Rung.RECOVER).leave == ("a",)
    assert refusal(facts, Rung.RECOVER_IN_PLACE) == "failed before in this incident: rank 1 never joined"


def test_a_second_fault_of_another_rank_is_restarted_in_place_again_in_the_same_incident() -> None:
    facts = facts_of(fault(FaultKind.EXIT, 3), taken=(Rung.RECOVER_IN_PLACE,))
    assert LADDER.decide(facts).rung is Rung.RECOVER_IN_PLACE


def test_a_rung_is_not_taken_more_often_in_one_incident_than_its_attempts() -> None:
    facts = facts_of(fault(FaultKind.EXIT, 3), taken=(Rung.RECOVER_IN_PLACE,) * 3)
    assert LADDER.decide(facts).rung is Rung.RECOVER
    assert "attempts is 3" in refusal(facts, Rung.RECOVER_IN_PLACE)


def test_an_incident_with_too_many_attempts_stops() -> None:
    policy = msgspec.structs.replace(default_policy(), incident=IncidentPolicy(max_attempts=2))
    facts = facts_of(fault(FaultKind.EXIT, 3), taken=(Rung.RETRY_STEP, Rung.RECOVER))
    decision = Ladder(policy).decide(facts)
    assert decision.rung is Rung.STOP
    assert "incident.max_attempts is 2" in decision.reason


def test_when_all_ladders_ends_fail_the_job_stops_with_every_reason() -> None:
    rungs = [rung for rung in Rung if rung is not Rung.STOP]
    failed = tuple(FailedRung(rung, f"{rung} broke") for rung in rungs)
    decision = LADDER.decide(facts_of(fault(FaultKind.EXIT, 3), failed=failed))
    assert decision.rung is Rung.STOP
    assert [skipped.rung for skipped in decision.skipped] == rungs
    assert all(f"{rung} broke" in decision.reason for rung in rungs)


def test_with_no_healthy_rank_left_the_world_is_restarted_where_it_is() -> None:
    facts = facts_of(*(fault(FaultKind.EXIT, rank) for rank in NODES))
    assert LADDER.decide(facts).rung is Rung.RESCHEDULE_POD
    assert LADDER.course(facts, Rung.RESCHEDULE_POD).leave == ()
    assert LADDER.course(facts, Rung.RESCHEDULE_POD).replace == (0, 1, 2, 3)
    assert "no healthy rank" in refusal(facts, Rung.RECOVER)


def test_recover_needs_a_healthy_rank_outside_the_nodes_to_be_left() -> None:
    reports = (
        fault(FaultKind.DEVICE, 0, level=FaultLevel.RESTART_NPU),
        fault(FaultKind.DEVICE, 2, level=FaultLevel.RESTART_NPU),
    )
    facts = facts_of(*reports, spare_nodes=("s", "t"))
    assert LADDER.decide(facts).rung is Rung.RESCHEDULE_POD
    assert "outside nodes a, b" in refusal(facts, Rung.RECOVER)


def test_a_world_that_is_not_resilient_is_restarted_as_a_whole_and_says_why() -> None:
    facts = facts_of(fault(FaultKind.EXIT, 1), resilient=False, healthy=frozenset(), max_restarts=3)
    decision = LADDER.decide(facts)
    assert decision.rung is Rung.RESCHEDULE_POD
    assert "no rank reached a resilient train function, so no process can be kept" in decision.reason


def test_max_restarts_takes_the_place_of_budgets_for_a_world_that_is_not_resilient() -> None:
    restarts = tuple(Spent(Rung.RESCHEDULE_POD, float(at)) for at in range(20))
    taken = (Rung.RESCHEDULE_POD,) * 20
    facts = facts_of(
        fault(FaultKind.EXIT, 1), resilient=False, healthy=frozenset(), max_restarts=21, spent=restarts, taken=taken
    )
    assert LADDER.decide(facts).rung is Rung.RESCHEDULE_POD
    spent = msgspec.structs.replace(facts, max_restarts=20)
    assert LADDER.decide(spent).rung is Rung.STOP
    assert "budget max-restarts is spent: 20 of 20" in LADDER.decide(spent).reason


def test_a_resilient_job_caught_while_it_starts_has_the_budgets_of_the_policy() -> None:
    facts = facts_of(fault(FaultKind.EXIT, 1), resilient=False, healthy=frozenset(), max_restarts=None)
    assert LADDER.decide(facts).rung is Rung.RESCHEDULE_POD


def test_a_ladder_without_recover_in_place_leaves_the_node_of_a_software_fault() -> None:
    ladder = Ladder(Policy(ladder=(RungPolicy(Rung.RECOVER), RungPolicy(Rung.STOP))))
    facts = facts_of(fault(FaultKind.EXIT, 3))
    assert ladder.decide(facts).rung is Rung.RECOVER
    assert ladder.course(facts, Rung.RECOVER).leave == ("b",)
    assert ladder.course(facts, Rung.RECOVER).cost == (Spent(Rung.RECOVER, 1000.0, (2, 3), ("b",)),)


def test_reschedule_job_gives_every_node_back() -> None:
    ladder = Ladder(Policy(ladder=(RungPolicy(Rung.RESCHEDULE_JOB), RungPolicy(Rung.STOP))))
    facts = facts_of(fault(FaultKind.EXIT, 3))
    assert ladder.decide(facts).rung is Rung.RESCHEDULE_JOB
    assert ladder.course(facts, Rung.RESCHEDULE_JOB).leave == ("a", "b")


def test_a_culprit_on_an_unknown_node_is_not_started_in_place() -> None:
    facts = facts_of(fault(FaultKind.EXIT, 9), culprits=(9,))
    assert LADDER.decide(facts).rung is Rung.RESCHEDULE_POD
    assert "rank 9 is not known" in refusal(facts, Rung.RECOVER_IN_PLACE)


def test_a_policy_with_stop_alone_stops_and_says_that_there_is_nothing_else() -> None:
    decision = Ladder(Policy(ladder=(RungPolicy(Rung.STOP),))).decide(facts_of(fault(FaultKind.EXIT, 3)))
    assert decision.rung is Rung.STOP
    assert "no other rung" in decision.reason


def test_a_reason_stays_short_for_ten_thousand_ranks() -> None:
    nodes = {rank: f"n{rank // 8}" for rank in range(10_000)}
    reports = tuple(fault(FaultKind.EXIT, rank) for rank in range(0, 10_000, 2))
    facts = Facts(
        now=0.0,
        faults=reports,
        culprits=tuple(range(0, 10_000, 2)),
        nodes=nodes,
        healthy=frozenset(range(1, 10_000, 2)),
    )
    decision = LADDER.decide(facts)
    assert decision.rung is Rung.RECOVER_IN_PLACE
    assert len(decision.reason) < 500
    assert "(5000 in all)" in decision.reason


def test_budgets_show_what_is_spent_of_each_limit() -> None:
    policy = Policy(
        ladder=(
            RungPolicy(Rung.RECOVER_IN_PLACE, budget=Budget(per_rank=2, per_node=4, per_job=5, window_s=100.0)),
            RungPolicy(Rung.STOP),
        )
    )
    spent = (
        Spent(Rung.RECOVER_IN_PLACE, 10.0, (0,), ("a",)),
        Spent(Rung.RECOVER_IN_PLACE, 150.0, (0,), ("a",)),
        Spent(Rung.RECOVER_IN_PLACE, 160.0, (1,), ("a",)),
        Spent(Rung.RECOVER, 170.0, (1,), ("a",)),
    )
    uses = {use.name: (use.used, use.limit) for use in Ladder(policy).budgets(spent, 200.0)}
    assert uses == {
        "recover_in_place per job": (2, 5),
        "recover_in_place per rank": (1, 2),
        "recover_in_place per node": (2, 4),
    }


def test_a_rank_at_fault_is_never_the_process_to_keep() -> None:
    facts = facts_of(fault(FaultKind.EXIT, 0), culprits=(0,), healthy=frozenset({0}))
    assert "no healthy rank is left" in refusal(facts, Rung.RECOVER_IN_PLACE)
