"""The forecast of what a loss of nodes and ranks costs is what the ladder says of the job as it stands."""

import msgspec
import pytest

from midstep.cli.what_if import lines, what_if
from midstep.policies.schema import Policy, RungPolicy, default_policy
from midstep.protocol.controls import Asked, Controls, RungOrder
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.incidents import BudgetUse, JobStatus, NodeStatus
from midstep.protocol.types import Rung

from .test_page_sentence import BEGAN_S, killed, status

POLICY = default_policy()


def asked(
    told: JobStatus, *, nodes: tuple[str, ...] = (), ranks: tuple[int, ...] = (), policy: Policy = POLICY
) -> list[str]:
    """The answer in lines, of a job whose platform brings no node."""
    return list(lines(what_if(told, policy, nodes, ranks, can_create_nodes=False)))


def test_a_killed_process_comes_back_in_place() -> None:
    told = asked(status(), ranks=(3,))
    assert told[0].startswith("recover_in_place: ")
    assert "budget recover_in_place per job: 2 of 30 would be spent" in told
    assert any(line.startswith("not retry_step: ") for line in told)


def test_a_lost_node_takes_the_spare_and_two_lost_ones_more_than_there_are() -> None:
    told = asked(status(), nodes=("node1",))
    assert told[0].startswith("recover: ")
    assert "spare nodes: 1, of which 1 would be used" in told
    assert asked(status(), nodes=("node0", "node1"))[0].startswith("stop: ")


def test_what_is_spent_and_what_operators_forbid_count() -> None:
    spent = status(budgets=(BudgetUse("recover_in_place per job", 30, 30),))
    assert asked(spent, ranks=(3,))[0].startswith("recover: ")
    order = RungOrder(Rung.RECOVER_IN_PLACE, BEGAN_S + 1000.0, Asked("ann", "operator", "the new driver"))
    forbidden = status(controls=Controls(rungs=(order,)))
    assert asked(forbidden, ranks=(3,))[0].startswith("recover: ")
    over = RungOrder(Rung.RECOVER_IN_PLACE, BEGAN_S, Asked("ann", "operator", "the new driver"))
    assert asked(status(controls=Controls(rungs=(over,))), ranks=(3,))[0].startswith("recover_in_place: ")


def test_a_rank_that_has_spent_its_own_budget_is_moved() -> None:
    """Three times in place for one rank is the default; another rank has its own."""
    incidents = tuple(killed() for _ in range(3))
    told = status(incidents=incidents, budgets=(BudgetUse("recover_in_place per job", 3, 30),))
    assert asked(told, ranks=(3,))[0].startswith("recover: ")
    assert asked(told, ranks=(0,))[0].startswith("recover_in_place: ")


def test_without_a_spare_a_lost_node_has_the_job_stop_or_all_start_again() -> None:
    nodes = (NodeStatus("node0", "a", "active", (0, 1)), NodeStatus("node1", "b", "active", (2, 3)))
    assert asked(status(nodes=nodes), nodes=("node1",))[0].startswith("stop: ")
    found = what_if(status(nodes=nodes), POLICY, ("node1",), (), can_create_nodes=True)
    assert found.decision is not None
    assert found.decision.rung is Rung.RECOVER


def test_host_copies_that_would_be_left_are_told_with_their_age() -> None:
    """Those of a lost node are gone, unless another node keeps them."""
    ranks = tuple(msgspec.structs.replace(each, copied_steps=(9, 10)) for each in status().ranks)
    told = msgspec.structs.replace(status(), committed=12, ranks=ranks)
    kept = "state comes from ranks that hold the same, or from host copies of step 10, 2 steps ago; where none does, "
    assert f"{kept}from the newest checkpoint" in asked(told, ranks=(3,))
    assert "host copies of step 10 go with node node1" in asked(told, nodes=("node1",))
    restarts = Policy(ladder=(RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP)))
    said = "on the same nodes from host copies of step 10, 2 steps ago, if these are newer"
    assert said in asked(told, ranks=(3,), policy=restarts)


def test_a_spare_that_is_lost_hurts_no_rank() -> None:
    told = asked(status(), nodes=("node2",))
    assert told == ["training continues", "no rank is there, and 0 spare nodes would be left"]


@pytest.mark.parametrize(
    ("nodes", "ranks", "says"),
    [((), (), "name a node or a rank"), (("node9",), (), "no node 'node9'"), ((), (77,), "no rank 77")],
)
def test_what_the_job_does_not_have_cannot_be_lost(nodes: tuple[str, ...], ranks: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        asked(status(), nodes=nodes, ranks=ranks)
