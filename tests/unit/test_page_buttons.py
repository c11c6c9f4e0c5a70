"""A button of the page asks the controller for what it says: a budget's limit is a change of the policy in force."""

import pytest

from midstep.cli.page.buttons import InForce, Press, WrongPress, request_of
from midstep.cli.page.sections import Looked, SectionWriter
from midstep.controller.endpoints.control_requests import ApplyPolicyRequest
from midstep.policies.schema import Policy, RungPolicy, changes
from midstep.protocol.identities import Role
from midstep.protocol.types import Rung

from .test_page_sentence import status


def pressed(limit: str, scope: str = "job", rung: str = "recover") -> Press:
    """The button for a budget, confirmed."""
    return Press("budget", "ann", "it is serviced this week", {"rung": rung, "scope": scope, "limit": limit})


def test_a_budget_is_set_and_nothing_else_of_the_policy_in_force_changes() -> None:
    """With the number of the next change, so that no other one is undone unseen."""
    before = Policy(black_box_bytes=8192)
    asked = request_of(pressed("21"), Role.OPERATOR, InForce(before, 3))
    assert isinstance(asked, ApplyPolicyRequest)
    assert [each.text for each in changes(before, asked.policy)] == ["ladder.recover.budget.per_job: 10 -> 21"]
    assert (asked.number, asked.by, asked.why) == (4, "ann, operator of the page", "it is serviced this week")
    of_rank = request_of(pressed("2", "rank", "recover_in_place"), Role.OPERATOR, InForce(before, 0))
    assert isinstance(of_rank, ApplyPolicyRequest)
    (change,) = changes(before, of_rank.policy)
    assert change.key == "ladder.recover_in_place.budget.per_rank"


@pytest.mark.parametrize(
    ("press", "in_force", "said"),
    [
        (pressed("many"), InForce(Policy(), 0), "limit: a number"),
        (pressed("0"), InForce(Policy(), 0), ">= 1"),
        (pressed("10"), InForce(Policy(), 0), "that is the limit already"),
        (pressed("10"), InForce(Policy(ladder=(RungPolicy(Rung.STOP),)), 0), "the policy's ladder has no recover"),
        (pressed("10"), None, "not known here"),
        (pressed("10", "world"), InForce(Policy(), 0), "one of job, node, rank"),
    ],
)
def test_a_limit_that_will_not_do_is_refused_with_a_sentence(press: Press, in_force: InForce | None, said: str) -> None:
    with pytest.raises(WrongPress, match=said):
        request_of(press, Role.OPERATOR, in_force)


@pytest.mark.parametrize(
    ("policy", "injects"), [(None, b"true"), (Policy(), b"true"), (Policy(allow_inject=False), b"false")]
)
def test_the_page_is_told_whether_the_policy_allows_faults_on_purpose(policy: Policy | None, injects: bytes) -> None:
    told = SectionWriter().write(Looked(status(), in_force=policy))["policy"]
    assert b'"injects":' + injects in told
