"""A policy that changes while the job runs: which keys may, and what the machine makes of it."""

from typing import Any

import msgspec
import pytest

from midstep.controller.endpoints.control_requests import ApplyPolicyRequest, Refused
from midstep.controller.endpoints.request_handler import RequestHandler
from midstep.controller.recovery.events import ControlAnswered, PolicyApplied
from midstep.controller.switchover import Switchover
from midstep.policies.files import parse_policy, render
from midstep.policies.rules import job_settings
from midstep.policies.schema import Policy, changes, may_change, obstacle
from midstep.policies.yaml_text import read_tree
from midstep.protocol.controls import Asked
from midstep.protocol.plain_yaml import write_yaml
from midstep.testing.fake_cluster import FakeCluster, job

ASKED = Asked("ann", "operator", "the cluster is serviced")
ANOTHER = """
deadlines: {quiesce_s: 11, start_s: 61, rejoin_s: 61, first_step_s: 301, save_s: 301, orders_s: 900, stop_grace_s: 9}
incident: {max_attempts: 9}
node: {failures: 7, window_s: 60}
sub_health: ignore
save_before_reschedule: false
scale: {min_interval_s: 5}
faults: {in_place_age_s: 5}
node_check: {within_s: 5}
stall: {factor: 9}
heartbeat: {interval_s: 0.6}
checkpoint: {keep: 9}
"""


def changed(policy: Policy, key: str, value: object) -> Policy:
    """Return a policy with another value of a key."""
    tree: Any = read_tree(render(policy), "the policy")
    *above, last = key.split(".")
    place = tree
    for name in above:
        place = next(each for each in place if each["rung"] == name) if isinstance(place, list) else place[name]
    place[last] = value
    return parse_policy(write_yaml(tree), "the policy")


def test_changes_name_their_keys_and_a_rung_by_its_name() -> None:
    found = changes(Policy(), changed(Policy(), "ladder.recover.budget.per_job", 20))
    assert [each.text for each in found] == ["ladder.recover.budget.per_job: 10 -> 20"]
    without = msgspec.structs.replace(Policy(), ladder=Policy().ladder[1:])
    assert {each.after for each in changes(Policy(), without)} == {"-"}


def test_what_may_change_is_no_part_of_what_agents_and_ranks_were_started_with() -> None:
    another = parse_policy(ANOTHER, "another")
    free = [each.key for each in changes(Policy(), another) if may_change(each.key)]
    assert len(free) == 12
    for key in free:
        value: Any = msgspec.to_builtins(another)
        for name in key.split("."):
            value = value[name]
        assert job_settings(changed(Policy(), key, value), "/job") == job_settings(Policy(), "/job"), key


def test_keys_that_processes_go_by_are_refused_by_name() -> None:
    why_not = obstacle(changes(Policy(), parse_policy(ANOTHER, "another")))
    assert why_not is not None
    named = "deadlines.orders_s, deadlines.stop_grace_s, deadlines.save_s, checkpoint.keep, stall.factor, "
    assert why_not.startswith(f"{named}heartbeat.interval_s cannot")


def apply(cluster: FakeCluster, policy: Policy, number: int = 1) -> ControlAnswered:
    """Have an operator apply a policy."""
    cluster.feed(PolicyApplied(policy, number, ASKED))
    return [action for action in cluster.log if isinstance(action, ControlAnswered)][-1]


def test_a_policy_is_in_force_from_the_next_decision_and_in_the_record(cluster: FakeCluster) -> None:
    policy = changed(cluster.machine.state.policy, "ladder.recover_in_place.budget.per_job", 77)
    assert not apply(cluster, policy).refused
    status = cluster.machine.status(cluster.now)
    assert {use.limit for use in status.budgets if use.name == "recover_in_place per job"} == {77}
    assert status.policy_changes == 1
    (record,) = status.controls.records
    assert record.asked == ASKED
    assert record.what.startswith("change the policy: ladder.recover_in_place.budget.per_job: ")
    assert record.what.endswith(" -> 77")


def test_a_controller_that_takes_over_goes_by_it(cluster: FakeCluster) -> None:
    """From a snapshot of the machine; from the events it is the same machine anyhow."""
    policy = changed(cluster.machine.state.policy, "incident.max_attempts", 5)
    assert not apply(cluster, policy).refused
    restored = cluster.new_machine()
    restored.restore(cluster.machine.memory())
    assert restored.state.policy == policy
    assert restored.state.ladder.policy == policy


def test_a_change_that_does_not_know_of_the_last_one_is_refused(cluster: FakeCluster) -> None:
    policy = changed(cluster.machine.state.policy, "incident.max_attempts", 5)
    assert not apply(cluster, policy).refused
    assert apply(cluster, changed(policy, "incident.max_attempts", 6)).refused
    assert apply(cluster, policy, 2).text == "it is the policy that is in force: nothing differs"
    assert cluster.machine.state.policy == policy


def test_the_controller_holds_a_policy_against_the_rules_itself(cluster: FakeCluster) -> None:
    """Whatever the command has checked: the request may come from another program."""
    wrong = msgspec.structs.replace(Policy(), ladder=Policy().ladder[:2])
    told: list[Any] = []
    request = ApplyPolicyRequest(wrong, 1, "ann", "a try")
    handler = RequestHandler(job(), Switchover())
    assert handler.begin(request, "operator", lambda: cluster.machine.status(cluster.now), told.append) is None
    assert isinstance(told[0], Refused)
    assert "ladder" in told[0].reason


@pytest.mark.parametrize("key", ["roles.actors.ladder.recover.attempts", "ladder", "deadlines.start_s"])
def test_ladders_and_deadlines_may_change(key: str) -> None:
    assert may_change(key)
    assert not may_change("roles.actors.ranks")
    assert not may_change("laddering")
