"""Limits hold: over a window, for a rank, a node, the job; and whatever the facts are."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstep.policies.budgets import Facts, FailedRung, Roles, Spent
from midstep.policies.ladder import Ladder, place
from midstep.policies.schema import Budget, Policy, RungPolicy
from midstep.protocol.types import FaultKind, FaultLevel, FaultReport, Rung

NODES = {rank: f"n{rank // 2}" for rank in range(6)}


def exit_of(rank: int) -> FaultReport:
    return FaultReport(kind=FaultKind.EXIT, at_s=0.0, seen_by="test", detail="", rank=rank)


def killed(rank: int, now: float, spent: tuple[Spent, ...] = ()) -> Facts:
    return Facts(
        now=now,
        faults=(exit_of(rank),),
        culprits=(rank,),
        nodes=NODES,
        healthy=frozenset(NODES) - {rank},
        spent=spent,
    )


def ladder_with(budget: Budget) -> Ladder:
    return Ladder(Policy(ladder=(RungPolicy(Rung.RECOVER_IN_PLACE, budget=budget), RungPolicy(Rung.STOP))))


@pytest.mark.parametrize(
    ("budget", "other_rank", "words"),
    [
        (Budget(per_rank=2), 1, "budget per_rank of rank 0 is spent: 2 of 2 within 3600 s"),
        (Budget(per_node=2), 2, "budget per_node of node n0 is spent: 2 of 2 within 3600 s"),
        (Budget(per_job=2, window_s=0.0), None, "budget per_job is spent: 2 of 2 in this job"),
    ],
)
def test_a_spent_budget_stops_the_job_by_name_and_leaves_others_alone(
    budget: Budget, other_rank: int | None, words: str
) -> None:
    ladder = ladder_with(budget)
    spent: tuple[Spent, ...] = ()
    for at_s in (10.0, 20.0):
        facts = killed(0, at_s, spent)
        assert ladder.decide(facts).rung is Rung.RECOVER_IN_PLACE
        spent += ladder.course(facts, Rung.RECOVER_IN_PLACE).cost
    decision = ladder.decide(killed(0, 30.0, spent))
    assert decision.rung is Rung.STOP
    assert words in decision.reason
    if other_rank is not None:
        assert ladder.decide(killed(other_rank, 30.0, spent)).rung is Rung.RECOVER_IN_PLACE


def test_what_is_older_than_the_window_is_forgotten() -> None:
    ladder = ladder_with(Budget(per_rank=1, window_s=100.0))
    spent = (Spent(Rung.RECOVER_IN_PLACE, 0.0, (0,), ("n0",)),)
    assert ladder.decide(killed(0, 99.0, spent)).rung is Rung.STOP
    assert ladder.decide(killed(0, 100.0, spent)).rung is Rung.RECOVER_IN_PLACE


def test_a_rank_out_of_budget_moves_while_another_restarts_in_place() -> None:
    policy = Policy(
        ladder=(
            RungPolicy(Rung.RECOVER_IN_PLACE, budget=Budget(per_rank=1)),
            RungPolicy(Rung.RECOVER),
            RungPolicy(Rung.STOP),
        )
    )
    spent = (Spent(Rung.RECOVER_IN_PLACE, 0.0, (0,), ("n0",)),)
    facts = msgspec.structs.replace(
        killed(0, 1.0, spent),
        faults=(exit_of(0), exit_of(5)),
        culprits=(0, 5),
        healthy=frozenset({1, 2, 3, 4}),
        spare_nodes=("s",),
    )
    placement = place(facts, Roles(policy), policy.node)
    assert Ladder(policy).decide(facts).rung is Rung.RECOVER
    assert (placement.in_place, placement.moved, placement.leave) == ((5,), (0, 1), ("n0",))


limits = st.none() | st.integers(1, 3)
budgets = st.builds(
    Budget, per_rank=limits, per_node=limits, per_job=limits, window_s=st.sampled_from([0.0, 5.0, 50.0])
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any ladder in the right order."""
    kept = [rung for rung in Rung if rung is not Rung.STOP and draw(st.booleans())]
    rungs = [RungPolicy(rung, attempts=draw(st.integers(1, 3)), budget=draw(budgets)) for rung in kept]
    return Policy(ladder=(*rungs, RungPolicy(Rung.STOP)))


places = [None, *NODES.values(), "elsewhere"]
faults = st.builds(
    FaultReport,
    kind=st.sampled_from(FaultKind),
    at_s=st.just(0.0),
    seen_by=st.just("test"),
    detail=st.just(""),
    rank=st.none() | st.integers(0, 7),
    node=st.sampled_from(places),
    level=st.sampled_from(FaultLevel),
)
spendings = st.builds(
    Spent,
    rung=st.sampled_from(Rung),
    at_s=st.floats(0, 100),
    ranks=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    nodes=st.lists(st.sampled_from(sorted(set(NODES.values()))), max_size=2).map(tuple),
)
any_facts = st.builds(
    Facts,
    now=st.just(100.0),
    faults=st.lists(faults, max_size=4).map(tuple),
    culprits=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    nodes=st.just(NODES),
    healthy=st.frozensets(st.integers(0, 5)),
    resilient=st.booleans(),
    max_restarts=st.none() | st.integers(0, 3),
    nodes_lost=st.frozensets(st.sampled_from(["n0", "n1", "old"])),
    isolated=st.frozensets(st.sampled_from(["n2", "old"])),
    spare_nodes=st.sampled_from([(), ("s0",), ("s0", "s1", "s2")]),
    can_create_nodes=st.booleans(),
    taken=st.lists(st.sampled_from(Rung), max_size=6).map(tuple),
    failed=st.lists(st.builds(FailedRung, st.sampled_from(Rung), st.just("broke")), max_size=3).map(tuple),
    spent=st.lists(spendings, max_size=8).map(tuple),
).map(lambda facts: msgspec.structs.replace(facts, max_restarts=None) if facts.resilient else facts)


@settings(deadline=None, max_examples=150)
@given(policy=policies(), facts=any_facts)
def test_every_decision_is_a_rung_of_the_ladder_with_a_reason_for_each_cheaper_one(
    policy: Policy, facts: Facts
) -> None:
    ladder = Ladder(policy)
    decision = ladder.decide(facts)
    order = [entry.rung for entry in policy.ladder]
    assert [skipped.rung for skipped in decision.skipped] == order[: order.index(decision.rung)]
    assert decision.reason
    assert all(skipped.reason for skipped in decision.skipped)
    assert ladder.decide(facts) == decision


@settings(deadline=None, max_examples=150)
@given(policy=policies(), facts=any_facts)
def test_a_rung_that_failed_is_never_taken_again_and_nothing_is_taken_too_often(policy: Policy, facts: Facts) -> None:
    taken = Ladder(policy).decide(facts).rung
    if taken is Rung.STOP:
        return
    assert taken not in {failed.rung for failed in facts.failed}
    restart_of_script = not facts.resilient and facts.max_restarts is not None
    if not restart_of_script:
        entry = policy.rung(taken)
        assert entry is not None
        assert facts.taken.count(taken) < entry.attempts
        assert len(facts.taken) < policy.incident.max_attempts


@settings(deadline=None, max_examples=150)
@given(policy=policies(), facts=any_facts)
def test_what_is_kept_and_what_is_left_agree_with_the_world(policy: Policy, facts: Facts) -> None:
    ladder = Ladder(policy)
    rung = ladder.decide(facts).rung
    leave = ladder.course(facts, rung).leave
    replaced = ladder.course(facts, rung).replace
    dead = (facts.nodes_lost | facts.isolated) & set(NODES.values())
    if rung in {Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER}:
        assert facts.resilient
        assert facts.healthy - set(replaced)
    if rung in {Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE}:
        assert not dead
        assert replaced == tuple(sorted(set(facts.culprits)))
    if rung in {Rung.RECOVER, Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB}:
        assert dead <= set(leave)
        there = len(facts.spare_nodes) + (facts.promised_nodes if rung is Rung.RECOVER else 0)
        assert facts.can_create_nodes or len(leave) <= there
        assert set(facts.culprits) & set(NODES) <= set(replaced)
    if rung is Rung.RECOVER:
        assert {rank for rank, node in NODES.items() if node in leave} <= set(replaced)


@settings(deadline=None, max_examples=80)
@given(policy=policies(), incidents=st.lists(st.tuples(any_facts, st.floats(0, 10)), min_size=1, max_size=25))
def test_no_budget_is_ever_overdrawn_in_a_whole_job(policy: Policy, incidents: list[tuple[Facts, float]]) -> None:
    ladder = Ladder(policy)
    spent: tuple[Spent, ...] = ()
    now = 0.0
    for imagined, pause_s in incidents:
        now += pause_s
        facts = msgspec.structs.replace(imagined, now=now, spent=spent, max_restarts=None)
        spent += ladder.course(facts, ladder.decide(facts).rung).cost
        for entry in policy.ladder:
            if entry.rung is not Rung.STOP:
                assert_within(entry, spent, now)


def assert_within(entry: RungPolicy, spent: tuple[Spent, ...], now: float) -> None:
    """Count again, by the words of the documentation, what the window holds."""
    budget = entry.budget
    counted = [
        one for one in spent if one.rung is entry.rung and (budget.window_s == 0 or now - one.at_s < budget.window_s)
    ]
    if budget.per_job is not None:
        assert len(counted) <= budget.per_job
    for rank in range(8):
        if budget.per_rank is not None:
            assert sum(rank in one.ranks for one in counted) <= budget.per_rank
    for node in set(NODES.values()):
        if budget.per_node is not None:
            assert sum(node in one.nodes for one in counted) <= budget.per_node


@settings(deadline=None, max_examples=100)
@given(policy=policies(), facts=any_facts)
def test_restarts_of_a_script_never_exceed_max_restarts(policy: Policy, facts: Facts) -> None:
    ladder = Ladder(policy)
    spent: tuple[Spent, ...] = ()
    limit = facts.max_restarts or 0
    for _ in range(limit + 2):
        now = msgspec.structs.replace(facts, resilient=False, max_restarts=limit, spent=spent)
        spent += ladder.course(now, ladder.decide(now).rung).cost
    restarts = [one for one in spent if one.rung in {Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB}]
    assert len(restarts) <= limit
