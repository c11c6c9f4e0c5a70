"""Roles: parts of the world with a ladder of their own, or with the job's."""

import msgspec
import pytest

from midstep.policies.budgets import Facts, FailedRung, Roles, Spent, beyond, parse_ranks
from midstep.policies.files import parse_policy
from midstep.policies.ladder import Ladder
from midstep.policies.rules import advice
from midstep.protocol.errors import PolicyError
from midstep.protocol.types import FaultKind, FaultReport, Rung

# Eight ranks, two on each node; 0 to 3 train, 4 and 5 have no role, 6 evaluates, 7 fails over with the job.
ROLES = """
roles:
  trainer:
    ranks: 0-3
    ladder: [{rung: recover_in_place, budget: {per_rank: 1}}, {rung: recover, attempts: 1}, {rung: stop}]
  evaluator: {ranks: "6", ladder: [{rung: recover_in_place}, {rung: reschedule_pod}, {rung: stop}]}
  logger: {ranks: "7"}
"""
LADDER = Ladder(parse_policy(ROLES, "job.yaml"))
NODES = {rank: f"n{rank // 2}" for rank in range(8)}


def killed(*ranks: int, **changes: object) -> Facts:
    """Facts of some processes that ended."""
    faults = tuple(FaultReport(FaultKind.EXIT, 0.0, "test", "", rank) for rank in ranks)
    facts = Facts(
        now=1000.0,
        faults=faults,
        culprits=ranks,
        nodes=NODES,
        healthy=frozenset(NODES).difference(ranks),
        spare_nodes=("spare",),
        can_create_nodes=True,
    )
    return msgspec.structs.replace(facts, **changes)


def refused(text: str) -> str:
    """What is said of a wrong policy."""
    with pytest.raises(PolicyError) as error:
        parse_policy(text, "job.yaml")
    return str(error.value)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ("{a: {ranks: 0-}}", "roles.a.ranks: '0-' is no rank and no range; allowed: ranks and ranges"),
        ("{a: {ranks: 5-3}}", "roles.a.ranks: the range 5-3 runs backwards"),
        ("{a: {ranks: 0-5}, b: {ranks: '7,4'}}", "roles.b.ranks: rank 4 belongs to role a already"),
        ("{b: {ranks: '7,4'}, a: {ranks: 0-5}}", "roles.a.ranks: rank 4 belongs to role b already"),
        ("{a: {ranks: '1,0-3'}}", "roles.a.ranks: rank 1 belongs to this role already"),
        ("{a: {ranks: 3}}", "roles.a.ranks: found 3; allowed: a text"),
        ("{a: {}}", "roles.a.ranks: missing"),
        ("{a: {ranks: 0-1, lader: []}}", "roles.a.lader: unknown key; allowed: ranks, ladder; did you mean ladder?"),
        ("{a: {ranks: 0-1, ladder: []}}", "roles.a.ladder: empty"),
        ("{a: {ranks: 0-1, ladder: [{rung: recover}]}}", "roles.a.ladder[0].rung: the last rung must be stop"),
        ("{'a b': {ranks: 0-1}}", "roles.a b: is not the name of a role; allowed: letters, digits"),
        ("[a]", "roles: found a list; allowed: a mapping"),
    ],
)
def test_a_wrong_role_is_refused_with_its_key_and_what_is_allowed(roles: str, words: str) -> None:
    assert f"job.yaml: {words}" in refused(f"roles: {roles}")


def test_every_rank_is_of_one_party_and_those_between_the_roles_of_the_jobs() -> None:
    roles = Roles(parse_policy(ROLES, "job.yaml"))
    assert [roles.role_of(rank) for rank in range(9)] == [*["trainer"] * 4, "", "", "evaluator", "logger", ""]
    assert [party.role for party in roles.parties((7, 5, 0))] == ["", "trainer", "logger"]
    assert roles.parties(()) == (roles.job,)
    assert parse_ranks("8, 0-2,4") == ((0, 2), (4, 4), (8, 8))


def test_check_explains_gaps_and_what_a_missing_ladder_means() -> None:
    notes = advice(parse_policy(ROLES, "job.yaml"))
    assert "roles: ranks 4 to 5 have no role and recover by the job's ladder, as all ranks above do" in notes
    assert "roles.logger has no ladder: a fault of one of its ranks restarts the whole job" in notes
    assert not any("roles" in note for note in advice(parse_policy("", "job.yaml")))


def test_a_role_that_names_a_rank_which_the_job_has_not_is_found_before_the_start() -> None:
    policy = parse_policy(ROLES, "job.yaml")
    assert beyond(policy, 8) is None
    assert beyond(policy, 7) == "roles.logger.ranks: there is no rank 7 in this job; allowed: 0 to 6"


def test_a_role_recovers_by_its_own_ladder_and_the_reason_names_it() -> None:
    decision = LADDER.decide(killed(0))
    assert (decision.rung, decision.roles) == (Rung.RECOVER_IN_PLACE, ("trainer",))
    assert decision.reason.startswith("role trainer: rank 0 ended: rank 0 can be restarted on node n0")
    assert Rung.RETRY_STEP not in [skipped.rung for skipped in decision.skipped]


def test_ranks_without_a_role_go_by_the_jobs_ladder() -> None:
    decision = LADDER.decide(killed(4))
    assert (decision.rung, decision.roles) == (Rung.RECOVER_IN_PLACE, ())
    assert decision.skipped[0].rung is Rung.RETRY_STEP
    assert not decision.reason.startswith("role")


def test_a_role_without_a_ladder_fails_over_with_the_job() -> None:
    facts = killed(7)
    decision = LADDER.decide(facts)
    assert decision.rung is Rung.RESCHEDULE_POD
    assert {skipped.reason for skipped in decision.skipped} == {
        "role logger has no ladder of its own, so it fails over with the job"
    }
    assert [spent.role for spent in LADDER.course(facts, decision.rung).cost] == [""]


def test_each_role_spends_its_own_budget_and_nobody_elses() -> None:
    facts = killed(0)
    (spent,) = LADDER.course(facts, Rung.RECOVER_IN_PLACE).cost
    assert spent == Spent(Rung.RECOVER_IN_PLACE, 1000.0, (0,), ("n0",), "trainer")
    again = LADDER.decide(killed(0, spent=(spent,)))
    assert again.rung is Rung.RECOVER
    assert "role trainer: budget per_rank of rank 0 is spent: 1 of 1" in again.skipped[0].reason
    assert LADDER.decide(killed(0, spent=(msgspec.structs.replace(spent, role=""),))).rung is Rung.RECOVER_IN_PLACE
    names = [use.name for use in LADDER.budgets((spent,), 1000.0)]
    assert "role trainer: recover_in_place per rank" in names
    assert "recover_in_place per rank" in names
    assert not any("logger" in name for name in names)


def test_an_incident_of_several_roles_takes_the_cheapest_rung_that_all_their_ladders_allow() -> None:
    both = killed(0, 6)
    decision = LADDER.decide(both)
    assert decision.rung is Rung.RECOVER_IN_PLACE
    assert decision.reason.startswith("roles trainer, evaluator: ranks 0, 6 ended")
    assert [(spent.role, spent.ranks) for spent in LADDER.course(both, decision.rung).cost] == [
        ("trainer", (0,)),
        ("evaluator", (6,)),
    ]
    failed = LADDER.decide(
        killed(0, 6, taken=(Rung.RECOVER_IN_PLACE,), failed=(FailedRung(Rung.RECOVER_IN_PLACE, "no links"),))
    )
    assert failed.rung is Rung.STOP
    reasons = {skipped.rung: skipped.reason for skipped in failed.skipped}
    assert reasons[Rung.RECOVER_IN_PLACE] == "failed before in this incident: no links"
    assert reasons[Rung.RECOVER] == "role evaluator: recover is not on the ladder"
    assert reasons[Rung.RESCHEDULE_POD] == "role trainer: reschedule_pod is not on the ladder"


def test_a_restart_of_the_world_by_a_role_is_charged_to_the_job_too() -> None:
    facts = killed(6, resilient=False, healthy=frozenset())
    assert LADDER.decide(facts).rung is Rung.RESCHEDULE_POD
    charges = LADDER.course(facts, Rung.RESCHEDULE_POD).cost
    assert [(spent.role, spent.ranks) for spent in charges] == [("evaluator", (6,)), ("", ())]
    used_up = tuple(Spent(Rung.RESCHEDULE_POD, 999.0) for _ in range(5))
    decision = LADDER.decide(msgspec.structs.replace(facts, spent=used_up))
    assert decision.rung is Rung.STOP
    assert "reschedule_pod: budget per_job is spent: 5 of 5" in decision.reason
