"""The ladder over random facts: hand-over, roles, mending and counts, whatever has happened."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from midstep.policies.budgets import Facts, FailedRung, NodeFailure, Roles, Spent
from midstep.policies.ladder import Ladder, place
from midstep.policies.schema import Budget, NodePolicy, Policy, RolePolicy, RungPolicy
from midstep.protocol.types import Decision, FaultKind, FaultLevel, FaultReport, Rung
from midstep.testing.invariants import KEEPING

RANKS = range(6)
NODES = {rank: f"n{rank // 2}" for rank in RANKS}
ORDER = tuple(Rung)

budgets = st.builds(
    Budget,
    per_rank=st.none() | st.integers(1, 3),
    per_node=st.none() | st.integers(1, 3),
    per_job=st.none() | st.integers(1, 4),
    window_s=st.sampled_from((0.0, 50.0)),
)


@st.composite
def ladders(draw: st.DrawFn) -> tuple[RungPolicy, ...]:
    """Some rungs in order, with stop as the last."""
    rungs = [rung for rung in ORDER[:-1] if draw(st.booleans())]
    return (*(RungPolicy(rung, draw(st.integers(1, 3)), draw(budgets)) for rung in rungs), RungPolicy(Rung.STOP))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """A ladder, and perhaps roles with or without one."""
    roles = {}
    if draw(st.booleans()):
        roles["a"] = RolePolicy("0-1", draw(st.none() | ladders()))
        roles["b"] = RolePolicy("4", draw(st.none() | ladders()))
    return Policy(ladder=draw(ladders()), roles=roles, node=NodePolicy(draw(st.none() | st.integers(1, 3)), 50.0))


@st.composite
def situations(draw: st.DrawFn) -> Facts:
    """Any faults, of any level, in any state of an incident and its job."""
    hit = draw(st.lists(st.sampled_from(RANKS), unique=True, max_size=4))
    faults: list[FaultReport] = []
    culprits: list[int] = []
    mendable: list[int] = []
    for rank in hit:
        mends = draw(st.booleans())
        level = draw(st.sampled_from((FaultLevel.SOFTWARE, FaultLevel.RESTART_BUSINESS, FaultLevel.SEPARATE_NPU)))
        kind = draw(st.sampled_from((FaultKind.EXIT, FaultKind.MEMORY, FaultKind.LINK)))
        faults.append(FaultReport(kind, 0.0, "test", "", rank, NODES[rank], level=level, mendable=mends))
        (mendable if mends else culprits).append(rank)
    if not hit or draw(st.booleans()):
        faults.append(FaultReport(FaultKind.COMMUNICATION, 0.0, "test", "", 5))
    rungs = st.sampled_from(ORDER[:-1])
    taken = draw(st.lists(rungs, max_size=5))
    failed = [rung for rung in dict.fromkeys(taken) if draw(st.booleans())]
    whom = st.sampled_from(RANKS)
    spent = [
        Spent(
            rung, draw(st.sampled_from((10.0, 60.0, 90.0))), (rank,), (NODES[rank],), draw(st.sampled_from(("", "a")))
        )
        for rung, rank in draw(st.lists(st.tuples(rungs, whom), max_size=6))
    ]
    resilient = draw(st.integers(0, 4)) > 0
    return Facts(
        now=100.0,
        faults=tuple(faults),
        culprits=tuple(sorted(culprits)),
        mendable=tuple(sorted(mendable)),
        nodes=NODES,
        healthy=frozenset(rank for rank in RANKS if rank not in hit) if resilient else frozenset(),
        resilient=resilient,
        isolated=frozenset(draw(st.sets(st.sampled_from(("n0", "n2")), max_size=1))),
        spare_nodes=tuple(f"s{number}" for number in range(draw(st.integers(0, 2)))),
        can_create_nodes=draw(st.booleans()),
        taken=tuple(taken),
        failed=tuple(FailedRung(rung, "it did not help") for rung in failed),
        spent=tuple(spent),
        node_failures=tuple(NodeFailure(NODES[rank], 90.0) for rank in draw(st.lists(whom, max_size=4))),
    )


def ladder_of(decision: Decision) -> list[Rung]:
    """The rungs that were asked, in their order."""
    return [*(skipped.rung for skipped in decision.skipped), decision.rung]


@settings(max_examples=60, deadline=None)
@given(policies(), situations())
def test_every_cheaper_rung_of_the_ladders_has_its_reason(policy: Policy, facts: Facts) -> None:
    """In order, each once, none without words, and none of those that failed is taken."""
    decision = Ladder(policy).decide(facts)
    asked = ladder_of(decision)
    assert asked == sorted(set(asked), key=ORDER.index)
    assert decision.reason
    assert all(skipped.reason for skipped in decision.skipped)
    assert decision.rung not in {failed.rung for failed in facts.failed}


@settings(max_examples=60, deadline=None)
@given(policies(), situations())
def test_a_rung_that_fails_hands_over_to_a_coarser_one_and_passes_over_none_that_fits(
    policy: Policy, facts: Facts
) -> None:
    """Each hand-over adds one failed rung; what is passed over on the way has said why, and the end is the stop."""
    ladder = Ladder(policy)
    decision = ladder.decide(facts)
    for _ in ORDER:
        if decision.rung is Rung.STOP:
            return
        facts = msgspec.structs.replace(
            facts,
            taken=(*facts.taken, decision.rung),
            failed=(*facts.failed, FailedRung(decision.rung, "it failed now")),
        )
        before, decision = decision, ladder.decide(facts)
        assert ORDER.index(decision.rung) > ORDER.index(before.rung)
        said = {skipped.rung: skipped.reason for skipped in decision.skipped}
        assert "it failed now" in said[before.rung]
        between = ORDER[ORDER.index(before.rung) + 1 : ORDER.index(decision.rung)]
        assert all(ladder.refusals(facts, rung) for rung in between)
    raise AssertionError("the ladder has no end")


@settings(max_examples=60, deadline=None)
@given(policies(), situations())
def test_everybody_at_fault_is_mended_replaced_in_place_or_moved_and_nobody_twice(policy: Policy, facts: Facts) -> None:
    """Who is neither at fault nor on a node that is left keeps its process, whenever a rung keeps any."""
    ladder = Ladder(policy)
    placement, decision = place(facts, Roles(policy), policy.node), ladder.decide(facts)
    groups = [set(placement.mended), set(placement.in_place), set(placement.moved)]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert {*facts.culprits, *facts.mendable} <= set().union(*groups)
    assert set(placement.mended) <= set(facts.mendable)
    if decision.rung in KEEPING:
        replaced = set(ladder.course(facts, decision.rung).replace)
        left = set(ladder.course(facts, decision.rung).leave)
        assert replaced == {*placement.culprits} | {rank for rank, node in NODES.items() if node in left}
        assert replaced.isdisjoint(placement.mended)
        assert facts.can_create_nodes or len(left) <= len(facts.spare_nodes) + facts.promised_nodes


@settings(max_examples=60, deadline=None)
@given(policies(), situations())
def test_no_decision_is_charged_beyond_any_budget(policy: Policy, facts: Facts) -> None:
    """Neither the job's nor a role's; what was over before stays where it was."""
    ladder = Ladder(policy)
    decision = ladder.decide(facts)
    after = facts.spent + ladder.course(facts, decision.rung).cost
    before = {use.name: use.used for use in ladder.budgets(facts.spent, facts.now)}
    for use in ladder.budgets(after, facts.now):
        assert use.used <= max(use.limit, before[use.name])


@settings(max_examples=60, deadline=None)
@given(policies(), situations())
def test_an_incident_of_several_roles_takes_nothing_that_one_of_them_alone_would_be_refused(
    policy: Policy, facts: Facts
) -> None:
    """A rung on none of a role's ladder is never taken for its ranks."""
    decision = Ladder(policy).decide(facts)
    for name in decision.roles:
        ladder = policy.roles[name].ladder
        on_it = {entry.rung for entry in (ladder if ladder is not None else policy.ladder)}
        assert decision.rung in on_it
        assert ladder is not None or decision.rung not in KEEPING


@settings(max_examples=200, deadline=None)
@given(policies(), situations(), st.floats(0.0, 100.0), st.none() | st.integers(0, 3))
def test_what_no_budget_counts_any_more_can_be_forgotten(
    policy: Policy, facts: Facts, later_s: float, max_restarts: int | None
) -> None:
    """Then and later everything is decided, and shown, as if it were still known: `--max-restarts` counts for ever."""
    ladder = Ladder(policy)
    if max_restarts is not None:
        facts = msgspec.structs.replace(facts, resilient=False, healthy=frozenset(), max_restarts=max_restarts)
    left = tuple(ladder.roles.still_counted(facts.spent, facts.now))
    now = facts.now + later_s
    assert ladder.budgets(left, now) == ladder.budgets(facts.spent, now)
    known, forgotten = (msgspec.structs.replace(facts, now=now, spent=spent) for spent in (facts.spent, left))
    assert ladder.choose(forgotten) == ladder.choose(known)
