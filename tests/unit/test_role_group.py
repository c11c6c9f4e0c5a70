"""The roles of a job together: who is started, stopped and restarted, and when the whole ends."""

import itertools
import random

import msgspec
import pytest

from midstep.controller.role_group import (
    EXIT_FAILED,
    EXIT_STOPPED,
    MAX_DEATHS,
    STABLE_S,
    EndGroup,
    GroupAction,
    GroupEvent,
    GroupPhase,
    GroupRules,
    GroupStopAsked,
    RoleEnded,
    RoleGroup,
    RoleLauncherLost,
    RoleState,
    StartRole,
    StopRole,
    begin,
    handle,
    reopen,
    used,
)
from midstep.policies.schema import Budget

ONCE = Budget(per_job=1, window_s=0.0)
UNLIMITED = Budget(per_job=None)
RULES = GroupRules(("actor", "rollout"), {"rollout": UNLIMITED}, frozenset({"actor"}), ONCE)
FINISHED, FAILED = 0, 1


def lost(role: str, attempt: int = 1, lived_s: float = 1.0) -> RoleLauncherLost:
    return RoleLauncherLost(role, attempt, "ended with signal 9", lived_s)


def ended(role: str, exit_code: int, attempt: int = 1) -> RoleEnded:
    return RoleEnded(role, attempt, exit_code, f"reason of {role}")


def after(*events: GroupEvent, rules: GroupRules = RULES, now_s: float = 100.0) -> tuple[RoleGroup, list[GroupAction]]:
    """Return what is known after the events, and what the last of them leads to."""
    group, actions = begin(rules)
    for event in events:
        group, actions = handle(group, rules, event, now_s)
    return group, list(actions)


def test_all_roles_are_started_at_the_beginning() -> None:
    assert after()[1] == [StartRole("actor", 1), StartRole("rollout", 1)]


def test_the_job_ends_well_when_the_roles_that_have_to_finish_have_and_the_others_have_been_stopped() -> None:
    _, actions = after(ended("actor", FINISHED))
    assert actions == [StopRole("rollout", 1)]
    group, actions = after(ended("actor", FINISHED), ended("rollout", EXIT_STOPPED))
    assert actions == [EndGroup(0, "finished: actor")]
    assert group.phase is GroupPhase.ENDED


def test_a_role_that_need_not_finish_may_end_first() -> None:
    assert after(ended("rollout", FINISHED))[1] == []
    assert after(ended("rollout", FINISHED), ended("actor", FINISHED))[1] == [EndGroup(0, "finished: actor")]


def test_without_until_all_roles_have_to_finish() -> None:
    rules = msgspec.structs.replace(RULES, until=frozenset(RULES.roles))
    assert after(ended("actor", FINISHED), rules=rules)[1] == []
    assert after(ended("actor", FINISHED), ended("rollout", FINISHED), rules=rules)[1] == [
        EndGroup(0, "all roles have finished")
    ]


def test_a_role_without_a_ladder_takes_all_along_and_all_begin_again_once_all_have_ended() -> None:
    group, actions = after(ended("rollout", FAILED))
    assert actions == [StopRole("actor", 1)]
    assert [(each.role, each.reason) for each in group.restarts] == [("rollout", "reason of rollout")]
    group, actions = after(ended("rollout", FAILED), ended("actor", EXIT_STOPPED))
    assert actions == [StartRole("actor", 2), StartRole("rollout", 2)]
    assert group.phase is GroupPhase.RUNNING


def test_a_role_that_has_finished_begins_again_with_the_others() -> None:
    rules = msgspec.structs.replace(RULES, until=frozenset(RULES.roles))
    actions = after(ended("actor", FINISHED), ended("rollout", FAILED), rules=rules)[1]
    assert actions == [StartRole("actor", 2), StartRole("rollout", 2)]


def test_the_budget_of_restarts_is_counted_and_the_reason_names_it() -> None:
    events = [ended("rollout", FAILED), ended("actor", EXIT_STOPPED), ended("rollout", FAILED, 2)]
    group, actions = after(*events)
    assert actions == [StopRole("actor", 2)]
    assert "the job's budget per_job of reschedule_job is spent: 1 of 1 in the whole job" in group.reason
    assert after(*events, ended("actor", EXIT_STOPPED, 2))[1] == [EndGroup(EXIT_FAILED, group.reason)]


def test_restarts_that_lie_outside_the_window_are_not_counted() -> None:
    rules = msgspec.structs.replace(RULES, restarts=Budget(per_job=1, window_s=60.0))
    group, _ = after(ended("rollout", FAILED), ended("actor", EXIT_STOPPED), rules=rules, now_s=100.0)
    assert rules.restarts is not None
    assert [used(group, rules.restarts, now_s) for now_s in (150.0, 170.0)] == [1, 0]
    again, _ = handle(group, rules, ended("rollout", FAILED, 2), 170.0)
    assert again.phase is GroupPhase.RESTARTING
    spent, _ = handle(group, rules, ended("rollout", FAILED, 2), 150.0)
    assert spent.phase is GroupPhase.ENDING


def test_a_restart_counts_for_the_role_that_failed_and_for_the_job() -> None:
    often = Budget(per_job=9, window_s=0.0)
    rules = msgspec.structs.replace(RULES, failover={"actor": ONCE, "rollout": UNLIMITED}, restarts=often)
    group, _ = after(ended("actor", FAILED), ended("rollout", EXIT_STOPPED), rules=rules)
    assert (used(group, often, 1.0), used(group, often, 1.0, "actor"), used(group, often, 1.0, "rollout")) == (1, 1, 0)
    again, _ = handle(group, rules, ended("rollout", FAILED, 2), 1.0)
    assert again.phase is GroupPhase.RESTARTING
    spent, _ = handle(group, rules, ended("actor", FAILED, 2), 1.0)
    assert "role actor's budget per_job of reschedule_job is spent: 1 of 1" in spent.reason


def test_without_reschedule_job_on_the_ladder_a_role_without_a_ladder_stops_the_job() -> None:
    rules = msgspec.structs.replace(RULES, restarts=None)
    group, _ = after(ended("rollout", FAILED), rules=rules)
    assert group.phase is GroupPhase.ENDING
    assert "reschedule_job is not on the job's ladder" in group.reason


def test_a_role_whose_own_ladder_ended_in_stop_ends_the_job() -> None:
    group, actions = after(ended("actor", FAILED))
    assert actions == [StopRole("rollout", 1)]
    assert group.reason == "role actor failed, by its own ladder: reason of actor"
    assert group.exit_code == EXIT_FAILED


def test_a_role_that_an_operator_has_stopped_ends_the_job_as_stopped() -> None:
    actions = after(ended("actor", EXIT_STOPPED), ended("rollout", EXIT_STOPPED))[1]
    assert actions == [EndGroup(EXIT_STOPPED, "role actor was stopped: reason of actor")]


def test_a_stop_asks_all_roles_once_and_comes_before_a_restart() -> None:
    assert after(GroupStopAsked("enough"))[1] == [StopRole("actor", 1), StopRole("rollout", 1)]
    assert after(GroupStopAsked("enough"), GroupStopAsked("again"))[1] == []
    events: list[GroupEvent] = [
        ended("rollout", FAILED),
        GroupStopAsked("enough"),
        ended("actor", EXIT_STOPPED),
    ]
    assert after(*events)[1] == [EndGroup(EXIT_STOPPED, "enough")]


def test_a_launcher_that_dies_is_started_again_and_the_other_role_hears_nothing_of_it() -> None:
    group, actions = after(lost("actor"))
    assert actions == [StartRole("actor", 1)]
    assert group.of("rollout") == begin(RULES)[0].of("rollout")


def test_a_launcher_that_dies_too_often_in_a_row_counts_as_a_failure_of_its_role() -> None:
    group, actions = after(*[lost("rollout")] * MAX_DEATHS)
    assert actions == [StopRole("actor", 1)]
    assert group.restarts[0].reason == f"its launcher ended with signal 9, {MAX_DEATHS} times in a row"
    steady = [lost("rollout", lived_s=STABLE_S)] * (3 * MAX_DEATHS)
    assert after(*steady)[1] == [StartRole("rollout", 1)]


def test_what_comes_from_an_earlier_attempt_changes_nothing() -> None:
    before, _ = after(ended("rollout", FAILED), ended("actor", EXIT_STOPPED))
    for event in (ended("actor", FAILED), lost("actor"), ended("rollout", FINISHED)):
        assert handle(before, RULES, event, 1.0) == (before, ())


def test_a_second_failure_after_a_restart_is_answered_like_the_first() -> None:
    """A known way to hang: a role marked as failing over is not looked at any more."""
    rules = msgspec.structs.replace(RULES, restarts=Budget(per_job=9, window_s=0.0))
    group, _ = begin(rules)
    for attempt in range(1, 9):
        group, actions = handle(group, rules, ended("rollout", FAILED, attempt), float(attempt))
        assert actions == (StopRole("actor", attempt),)
        group, actions = handle(group, rules, ended("actor", EXIT_STOPPED, attempt), float(attempt))
        assert actions == (StartRole("actor", attempt + 1), StartRole("rollout", attempt + 1))


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        ([], [StartRole("actor", 1), StartRole("rollout", 1)]),
        ([ended("rollout", FINISHED)], [StartRole("actor", 1)]),
        ([ended("rollout", FAILED)], [StartRole("actor", 2), StartRole("rollout", 2)]),
        ([GroupStopAsked("enough")], [EndGroup(EXIT_STOPPED, "enough")]),
        ([GroupStopAsked("enough"), *[ended(role, EXIT_STOPPED) for role in RULES.roles]], []),
    ],
)
def test_a_launcher_that_was_lost_with_all_roles_goes_on_where_it_was(
    events: list[GroupEvent], actions: list[GroupAction]
) -> None:
    """Roles that have ended are not started again, and what was spent stays spent."""
    group, _ = after(*events)
    read = msgspec.json.decode(msgspec.json.encode(group), type=RoleGroup)
    again, owed = reopen(read, RULES, roles_live=False)
    assert list(owed) == actions
    assert again.restarts == group.restarts


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        ([], [*[StartRole(role, 1) for role in RULES.roles], *[StopRole(role, 1) for role in RULES.roles]]),
        ([ended("rollout", FINISHED)], [StartRole("actor", 1), StopRole("actor", 1)]),
        ([ended("rollout", FAILED)], [StartRole("actor", 1), StopRole("actor", 1)]),
        ([GroupStopAsked("enough"), ended("actor", EXIT_STOPPED)], [StartRole("rollout", 1), StopRole("rollout", 1)]),
        (
            [ended("rollout", FAILED), ended("actor", EXIT_STOPPED)],
            [StartRole("actor", 2), StartRole("rollout", 2), StopRole("actor", 2), StopRole("rollout", 2)],
        ),
    ],
)
def test_roles_that_have_outlived_the_launcher_are_followed_and_asked_to_end(
    events: list[GroupEvent], actions: list[GroupAction]
) -> None:
    """What they had in the store is lost: all begin again, unless the job was to end. It spends nothing."""
    group, _ = after(*events)
    again, owed = reopen(group, RULES, roles_live=True)
    assert list(owed) == actions
    assert again.restarts == group.restarts
    for role in {action.role for action in owed if isinstance(action, StopRole)}:
        again, owed = handle(again, RULES, ended(role, EXIT_STOPPED, again.of(role).attempt), 1.0)
    if any(isinstance(event, GroupStopAsked) for event in events):
        assert owed == (EndGroup(EXIT_STOPPED, "enough"),)
    else:
        attempt = group.of("actor").attempt + 1
        assert owed == (StartRole("actor", attempt), StartRole("rollout", attempt))


def test_a_job_that_has_finished_while_its_roles_were_being_stopped_does_not_begin_again() -> None:
    group, _ = reopen(after()[0], RULES, roles_live=True)
    group, actions = handle(group, RULES, ended("actor", FINISHED), 1.0)
    assert actions == ()
    group, actions = handle(group, RULES, ended("rollout", EXIT_STOPPED), 1.0)
    assert actions == (EndGroup(0, "finished: actor"),)


def test_whatever_happens_in_whatever_order_the_job_ends_and_no_role_runs_then() -> None:
    """Each role is played: it ends when it is asked to, and fails, finishes or loses its launcher as it likes."""
    for seed in range(300):
        chance = random.Random(seed)
        group, actions = begin(RULES)
        running: dict[str, int] = {}
        stopping: set[str] = set()
        for turn in itertools.count():
            for action in actions:
                if isinstance(action, StartRole):
                    running[action.role] = action.attempt
                    stopping.discard(action.role)
                elif isinstance(action, StopRole):
                    assert running[action.role] == action.attempt
                    stopping.add(action.role)
            if any(isinstance(action, EndGroup) for action in actions):
                assert not running, seed
                break
            assert turn < 200, f"seed {seed}: the job does not end: {group}"
            role = chance.choice(sorted(running))
            attempt = running.pop(role)
            code = EXIT_STOPPED if role in stopping else chance.choice((FINISHED, FAILED, FAILED))
            event = lost(role, attempt) if chance.random() < 0.3 else ended(role, code, attempt)
            if chance.random() < 0.1:
                group, first = handle(group, RULES, GroupStopAsked("enough"), float(turn))
                running[role] = attempt
                actions = first
                continue
            group, actions = handle(group, RULES, event, float(turn))
            if chance.random() < 0.2:
                assert handle(group, RULES, event, float(turn))[1] == () or group.of(role).state is RoleState.RUNNING
        assert len(group.restarts) <= 1
