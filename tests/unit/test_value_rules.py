"""Rules on reported values: how a rank judges its own, and what the machine does about a broken one."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import ControllerStarted
from midstep.controller.recovery.state import Phase
from midstep.policies.rules import broken_rules
from midstep.policies.schema import Policy
from midstep.processor.rules import Judge, worst
from midstep.processor.train_thread import judge_of
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.messages import FaultReported, Quiesce, Rejoin, StartProcess
from midstep.protocol.rules import DO_NOT_REQUEUE, Jump, LeaveOut, RuleAction, Slow, ValueRule
from midstep.protocol.types import FaultKind, LocalStateCopy, StepReport
from midstep.testing.fake_cluster import HOLDS, SHARD, FakeCluster, only

NAN = math.nan
A_NUMBER = ValueRule("a_number", "loss", RuleAction.SKIP_BATCH, not_finite=True)
A_JUMP = ValueRule("a_jump", "loss", RuleAction.REPEAT_STEP, jump=Jump(4.0, over_steps=20))


def judged(rules: list[ValueRule], losses: Iterable[float], *, step_s: float = 1.0) -> list[list[str]]:
    """Return the names of the rules that each loss breaks, in steps of `step_s`."""
    judge = Judge(rules)
    found = [judge.judge(step, {"loss": loss}, step * step_s) for step, loss in enumerate(losses)]
    return [[each.rule.name for each in breaches] for breaches in found]


def as_report(rule: ValueRule) -> ValueRule:
    return msgspec.structs.replace(rule, then=RuleAction.REPORT)


@pytest.mark.parametrize("loss", [NAN, math.inf, -math.inf])
def test_no_number_breaks_a_rule(loss: float) -> None:
    assert judged([A_NUMBER], [1.0, loss, 2.0]) == [[], ["a_number"], []]


def test_a_value_that_is_not_reported_breaks_nothing() -> None:
    assert Judge([A_NUMBER]).judge(0, {"grad_norm": NAN}, 0.0) == ()


def test_limits_are_limits() -> None:
    rules = [
        ValueRule("high", "loss", RuleAction.STOP, above=2.0),
        ValueRule("low", "loss", RuleAction.REPORT, below=1.0),
    ]
    assert judged(rules, [2.0, 2.1, 1.0, 0.9, NAN]) == [[], ["high"], [], ["low"], ["high"]]


def test_a_jump_is_measured_against_the_steps_before() -> None:
    noisy = [1.0 + 0.01 * (step % 5) for step in range(20)]
    assert judged([A_JUMP], [*noisy, 1.06, 1.2, 1.02, NAN])[20:] == [[], ["a_jump"], [], ["a_jump"]]


def test_nothing_is_a_jump_before_ten_values_are_known() -> None:
    assert judged([A_JUMP], [1.0] * 9 + [50.0]) == [[]] * 10


def test_values_that_are_all_alike_make_no_jump_of_the_next() -> None:
    assert judged([A_JUMP], [1.0] * 15 + [1.000001]) == [[]] * 16


def test_a_step_that_is_repeated_counts_once() -> None:
    """So that a recovered run judges as an undisturbed one does."""
    noisy = [1.0 + 0.01 * (step % 5) for step in range(20)]
    repeated, undisturbed = Judge([A_JUMP]), Judge([A_JUMP])
    for step, loss in enumerate(noisy):
        for judge in (repeated, repeated, undisturbed) if step == 12 else (repeated, undisturbed):
            judge.judge(step, {"loss": loss}, float(step))
    answers = [each.judge(20, {"loss": 1.5}, 20.0) for each in (repeated, undisturbed)]
    assert answers[0] == answers[1] != ()


def test_a_rule_that_reports_says_so_once_for_as_long_as_it_is_broken() -> None:
    assert judged([as_report(A_NUMBER)], [NAN, NAN, 1.0, NAN]) == [["a_number"], [], [], ["a_number"]]


def test_of_rules_that_are_broken_together_the_sternest_counts() -> None:
    stop = ValueRule("stop", "loss", RuleAction.STOP, not_finite=True)
    judge = Judge([stop, as_report(msgspec.structs.replace(A_NUMBER, name="told")), A_NUMBER])
    breaches = judge.judge(0, {"loss": NAN}, 0.0)
    assert [each.rule.name for each in breaches] == ["told", "a_number", "stop"]
    assert judge.acting[worst(breaches) - 1] is stop


def test_slow_is_what_stays_slow() -> None:
    slow = ValueRule("slow", "loss", RuleAction.REPORT, slow=Slow(per_second=10.0, for_s=3.0))
    assert judged([slow], [5.0, 5.0, 5.0, 20.0, 5.0, 5.0, 5.0]) == [[]] * 7
    assert judged([slow], [5.0] * 6) == [[], [], [], [], ["slow"], []]


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (ValueRule("none", "loss", RuleAction.STOP), "one of not_finite"),
        (ValueRule("two", "loss", RuleAction.STOP, not_finite=True, above=1.0), "one of not_finite"),
        (ValueRule("back", "loss", RuleAction.ROLL_BACK, not_finite=True), "steps: at least 1"),
        (ValueRule("far", "loss", RuleAction.STOP, not_finite=True, steps=3), "steps: at least 1"),
        (ValueRule("slow", "loss", RuleAction.SKIP_BATCH, slow=Slow(1.0, 1.0)), "does not make anything faster"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(rule: ValueRule, wrong: str) -> None:
    (problem,) = broken_rules(Policy(rules=(rule,)))
    assert problem.key == "rules[0]"
    assert wrong in problem.text


def test_the_name_of_a_key_is_no_name_of_a_rule() -> None:
    taken = msgspec.structs.replace(A_NUMBER, name="out_of_memory")
    assert [each.key for each in broken_rules(Policy(rules=(taken,)))] == ["rules[0].name"]


def test_two_rules_of_one_name_are_refused() -> None:
    assert [each.key for each in broken_rules(Policy(rules=(A_NUMBER, A_NUMBER)))] == ["rules[1].name"]


# --- the machine ------------------------------------------------------------------------------------------------------


def job(rule: ValueRule) -> FakeCluster:
    """A job that trains, with one rule."""
    return FakeCluster(policy=Policy(rules=(rule,))).start()


def broken(cluster: FakeCluster, rank: int, step: int = 8, detail: str = "") -> FaultReported:
    return cluster.fault(rank, FaultKind.RULE, code="a_number", trusted_step=step, mendable=True, detail=detail)


def stopped(cluster: FakeCluster, step: int = 8) -> list[Rejoin]:
    """All ranks stop, and the plan is made; each has its local state of the next step."""
    said = []
    for rank in range(4):
        peers = [each for each in range(4) if each != rank]
        said += cluster.feed(cluster.quiesced(rank, step, ready=True, peers=peers))
    return only(said, Rejoin)


def test_all_ranks_stop_once_and_leave_out_the_batch() -> None:
    cluster = job(A_NUMBER)
    said = cluster.feed(broken(cluster, 0), *(broken(cluster, rank, detail="loss is nan") for rank in (1, 2, 3)))
    assert len(only(said, Quiesce)) == 4
    assert not only(said, StartProcess)
    assert {each.part.leave_out for each in stopped(cluster)} == {LeaveOut(1, 9)}
    cluster.pass_barrier_two(8)
    book = cluster.machine.state.rules
    assert (book.steps_left_out, book.standing, book.tallies["a_number"].times) == (1, None, 1)
    assert book.tallies["a_number"].detail == "loss is nan"
    assert all(not each.used for each in cluster.machine.status(cluster.now).budgets)


def test_what_is_left_out_stands_through_a_fault_and_a_takeover() -> None:
    cluster = job(A_NUMBER)
    cluster.feed(broken(cluster, 0))
    stopped(cluster)
    cluster.feed(cluster.exited(2))
    cluster.feed(ControllerStarted(2))
    for rank in (0, 1, 3):
        cluster.feed(cluster.quiesced(rank, 8, ready=True, peers=[2]))
    report = StepReport(0, ready=False, clean=False, needs=(SHARD,), local_states=(LocalStateCopy(2, 8),))
    joined = msgspec.structs.replace(cluster.joined(2), report=report)
    assert {each.part.leave_out for each in only(cluster.feed(joined), Rejoin)} == {LeaveOut(1, 9)}
    cluster.pass_barrier_two(8)
    assert cluster.machine.state.rules.steps_left_out == 1


def test_a_rank_that_is_lost_as_it_says_so_changes_nothing() -> None:
    """Its exit opens the generation; what the others say of the step before they have stopped still counts."""
    cluster = job(A_NUMBER)
    others = [broken(cluster, rank) for rank in (0, 1)]
    cluster.feed(cluster.exited(3))
    assert not only(cluster.feed(*others), Quiesce)
    for rank in range(3):
        cluster.feed(cluster.quiesced(rank, 8, ready=True, peers=[3]))
    said = cluster.feed(cluster.joined(3, own=8))
    assert {each.part.leave_out for each in only(said, Rejoin)} == {LeaveOut(1, 9)}


def test_more_in_a_row_than_allowed_ends_the_job() -> None:
    cluster = job(msgspec.structs.replace(A_NUMBER, at_most=2))
    for times in (1, 2):
        cluster.feed(broken(cluster, 0))
        assert {each.part.leave_out for each in stopped(cluster)} == {LeaveOut(times, 9)}
        for rank in range(4):
            cluster.feed(cluster.ready(rank, 8))
    cluster.feed(broken(cluster, 0))
    for rank in range(4):
        cluster.feed(cluster.quiesced(rank, 8))
    while cluster.machine.state.saving.outstanding:
        for rank in list(cluster.machine.state.saving.outstanding):
            cluster.feed(cluster.saved(rank, 8))
    assert cluster.finish is not None
    assert cluster.finish.exit_code == DO_NOT_REQUEUE
    assert "2 times in a row" in cluster.finish.reason


def test_going_back_without_anything_to_go_back_to_ends_the_job() -> None:
    rule = ValueRule("a_number", "loss", RuleAction.ROLL_BACK, not_finite=True, steps=3)
    cluster = job(rule)
    cluster.feed(broken(cluster, 0))
    stopped(cluster)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == DO_NOT_REQUEUE
    assert "nothing to go back to" in cluster.finish.reason


def test_going_back_takes_the_checkpoint_before_and_leaves_out_the_data_since_then() -> None:
    rule = ValueRule("a_number", "loss", RuleAction.ROLL_BACK, not_finite=True, steps=3)
    cluster = job(rule)
    cluster.feed(broken(cluster, 0))
    rejoin: list[Rejoin] = []
    for rank in range(4):
        local_states = tuple(LocalStateCopy(rank, step) for step in (8, 9))
        report = StepReport(8, ready=False, clean=True, holds=HOLDS, needs=(SHARD,), local_states=local_states)
        report = msgspec.structs.replace(report, checkpoints=(2, 4, 6))
        rejoin += only(cluster.feed(msgspec.structs.replace(cluster.quiesced(rank, 8), report=report)), Rejoin)
    assert {(each.part.target_step, each.part.leave_out) for each in rejoin} == {(4, LeaveOut(1, 9))}
    cluster.pass_barrier_two(4)
    assert cluster.machine.state.rules.steps_left_out == 5


def test_a_lack_of_memory_leaves_out_what_the_step_before_has_taken() -> None:
    """The others may not have come to the end of the step, so no position behind it is known."""
    cluster = FakeCluster().start()
    said = cluster.feed(cluster.fault(2, FaultKind.RULE, code="out_of_memory", trusted_step=8, mendable=True))
    assert len(only(said, Quiesce)) == 4
    rejoin = [each for rank in range(4) for each in only(cluster.feed(cluster.quiesced(rank, 8)), Rejoin)]
    assert {each.part.leave_out for each in rejoin} == {LeaveOut(1, 0)}


def test_a_rule_that_reports_is_counted_and_stops_nothing() -> None:
    cluster = job(as_report(A_NUMBER))
    assert cluster.feed(broken(cluster, 1, detail="loss is nan")) == []
    cluster.expect(Phase.RUNNING)
    assert cluster.machine.state.rules.tallies["a_number"].times == 1
    assert cluster.machine.incidents == ()


# --- frameworks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", list(RuleAction))
def test_a_framework_that_cannot_leave_data_out_refuses_rules_that_would(then: RuleAction) -> None:
    rule = msgspec.structs.replace(A_NUMBER, then=then, steps=int(then is RuleAction.ROLL_BACK))
    other: Any = object()
    if then in {RuleAction.SKIP_BATCH, RuleAction.ROLL_BACK}:
        with pytest.raises(ConfigurationError, match="a_number would leave data out, which a object cannot"):
            judge_of([rule], other)
    else:
        assert judge_of([rule], other) is not None


def test_without_rules_nothing_is_judged() -> None:
    assert judge_of([], object()) is None  # type: ignore[arg-type]
