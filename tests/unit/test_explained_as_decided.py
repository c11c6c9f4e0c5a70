"""`midstep policy explain` says what the machine decides, word for word: same facts, same text."""

import io

import msgspec
import pytest
from rich.console import Console

from midstep.cli.views.incident_data import report_json
from midstep.cli.views.status_view import status_view
from midstep.controller.recovery.events import Log
from midstep.policies.explain import SupposedWorld, Supposition, answer, parse_fault
from midstep.policies.files import parse_policy
from midstep.policies.schema import Policy
from midstep.protocol.messages import FaultReported, NodeLost
from midstep.protocol.types import Assertion, Decision, FaultKind, FaultReport, Rung
from midstep.testing.fake_cluster import FakeCluster, job

ROLES = """
roles:
  trainer: {ranks: 0-2, ladder: [{rung: retry_step}, {rung: recover_in_place}, {rung: recover}, {rung: stop}]}
  evaluator: {ranks: "3"}
"""
POLICIES = {"default": "", "roles": ROLES, "few": "ladder: [{rung: recover_in_place}, {rung: stop}]"}


def running(policy: Policy, spares: int = 1) -> FakeCluster:
    """A running job whose nodes are named as those that `explain` supposes."""
    cluster = FakeCluster(job(spares=spares), policy)
    cluster.join("node-0", "node-1", *(f"spare-{number}" for number in range(spares)))
    cluster.pass_barrier_two(0)
    return cluster


def suffer(cluster: FakeCluster, fault: FaultReport) -> Decision:
    """Let a fault happen, and return what was decided."""
    if fault.kind is FaultKind.NODE_LOST:
        cluster.feed(NodeLost(fault.node or "", "silent", cluster.now))
    else:
        where = fault.node if fault.rank is None else cluster.holder(fault.rank).node
        cluster.feed(FaultReported(msgspec.structs.replace(fault, at_s=cluster.now, node=where)))
    return cluster.machine.incidents[-1].decisions[-1]


def explained(policy: Policy, fault: FaultReport, world: SupposedWorld) -> Decision | None:
    """What the command line says."""
    return answer(policy, Supposition("", (fault,), world))[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize(
    "text",
    [
        "kind=exception,rank=0",
        "kind=exit,rank=3",
        "kind=node_lost,node=node-1",
        "level=RestartBusiness,rank=1",
        "level=SeparateNPU,rank=1,code=80E01801",
        "kind=memory,rank=2,mendable=true",
        "kind=memory,rank=3,mendable=true",
        "kind=link,rank=0,mendable=true,level=RestartBusiness",
        "kind=switch,node=node-0,level=SeparateNPU",
        "kind=corruption,rank=2",
    ],
)
def test_the_decision_of_the_machine_is_explained_word_for_word(text: str, policy: str, spares: int) -> None:
    rules = parse_policy(POLICIES[policy], "job.yaml")
    fault = parse_fault(text)
    world = SupposedWorld(spares=spares, can_create_nodes=False)
    assert suffer(running(rules, spares), fault) == explained(rules, fault, world)


def test_spent_budgets_and_failures_of_nodes_are_explained_as_they_are_counted() -> None:
    """Four restarts of one rank: the fourth is refused for the same reasons."""
    rules = parse_policy("", "job.yaml")
    fault = parse_fault("kind=exit,rank=0")
    cluster = running(rules)
    for step in (1, 2, 3):
        suffer(cluster, fault)
        cluster.recover(step)
    world = SupposedWorld(can_create_nodes=False, spent=((Rung.RECOVER_IN_PLACE, 3),), node_failures=(("node-0", 3),))
    decided = suffer(cluster, fault)
    assert decided == explained(rules, fault, world)
    assert decided.rung is Rung.RECOVER


def test_what_failed_in_the_incident_is_explained_alike() -> None:
    rules = parse_policy("", "job.yaml")
    fault = parse_fault("kind=device,rank=0,level=RestartRequest")
    cluster = running(rules)
    suffer(cluster, msgspec.structs.replace(fault, assertion=Assertion.OCCUR))
    cluster.feed(*(cluster.quiesced(rank, 1, peers=[0]) for rank in (1, 2, 3)))
    while cluster.machine.incidents[-1].rung is Rung.RECOVER_IN_PLACE:
        cluster.overdue()  # the device does not get well
    decided = cluster.machine.incidents[-1].decisions[-1]
    spoken = explained(rules, fault, SupposedWorld(can_create_nodes=False, failed=(Rung.RECOVER_IN_PLACE,)))
    assert spoken is not None
    before, after = (each.skipped[-1].reason.partition(":")[0] for each in (decided, spoken))
    assert before == after == "failed before in this incident"
    assert decided.rung is spoken.rung is Rung.RECOVER


def test_status_report_and_log_show_the_words_of_the_decision_and_the_role() -> None:
    """One source: what was decided is stored, and shown as it is."""
    rules = parse_policy(ROLES, "job.yaml")
    cluster = running(rules)
    fault = parse_fault("kind=exit,rank=0")
    decided = suffer(cluster, fault)
    spoken = explained(rules, fault, SupposedWorld(spares=1, can_create_nodes=False))
    assert spoken == decided
    words = decided.in_words()
    logged = [action.text for action in cluster.log if isinstance(action, Log)]
    assert logged == [f"incident 1: {each}" for each in words]
    status = cluster.machine.status(cluster.now)
    console = Console(file=io.StringIO(), width=1000)
    with console.capture() as captured:
        console.print(status_view(status))
    assert all(each in captured.get() for each in words)
    (incident,) = report_json(status, status.incidents)["incidents"]
    assert incident["reasons"][: len(words)] == words
    assert incident["decisions"][0]["roles"] == ["trainer"]
    assert [rank.role for rank in status.ranks] == ["trainer", "trainer", "trainer", "evaluator"]
