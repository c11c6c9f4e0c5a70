"""Rules on reported values: how a rank judges its own, and what the machine does about a broken one."""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import ControllerStarted
from midstep.controller.recovery.state import Phase, Result
from midstep.policies.rules import broken_rules
from midstep.policies.schema import Policy
from midstep.processor.rules import Judge, judge_of, worst
from midstep.processor.runtime import Runtime
from midstep.processor.session import Session
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.messages import FaultReported, Quiesce, Rejoin, StartProcess
from midstep.protocol.rules import DO_NOT_REQUEUE, JobRule, Jump, LeaveOut, RuleAction, Slow
from midstep.protocol.types import FaultKind, LocalStateCopy, StepReport
from midstep.testing.fake_cluster import HOLDS, SHARD, FakeCluster, only

NAN = math.nan
A_NUMBER = JobRule("a_number", RuleAction.SKIP_BATCH, value="loss", not_finite=True)
A_JUMP = JobRule("a_jump", RuleAction.REPEAT_STEP, value="loss", jump=Jump(4.0, over_steps=20))


def judged(rules: list[JobRule], losses: Iterable[float], *, step_s: float = 1.0) -> list[list[str]]:
    """Return the names of the rules that each loss breaks, in steps of `step_s`."""
    judge = Judge(rules)
    found = [judge.judge(step, {"loss": loss}, step * step_s) for step, loss in enumerate(losses)]
    return [[each.rule.name for each in breaches] for breaches in found]


def as_report(rule: JobRule) -> JobRule:
    return msgspec.structs.replace(rule, then=RuleAction.REPORT)


@pytest.mark.parametrize("loss", [NAN, math.inf, -math.inf])
def test_no_number_breaks_a_rule(loss: float) -> None:
    assert judged([A_NUMBER], [1.0, loss, 2.0]) == [[], ["a_number"], []]


def test_a_value_that_is_not_reported_breaks_nothing() -> None:
    assert Judge([A_NUMBER]).judge(0, {"grad_norm": NAN}, 0.0) == ()


def test_limits_are_limits() -> None:
    rules = [
        JobRule("high", RuleAction.STOP, value="loss", above=2.0),
        JobRule("low", RuleAction.REPORT, value="loss", below=1.0),
    ]
    assert judged(rules, [2.0, 2.1, 1.0, 0.9, NAN]) == [[], ["high"], [], ["low"], ["high"]]


def test_a_jump_is_measured_against_the_steps_before() -> None:
    noisy = [1.0 + 0.01 * (step % 5) for step in range(20)]
    assert judged([A_JUMP], [*noisy, 1.06, 1.2, 1.02, NAN])[20:] == [[], ["a_jump"], [], ["a_jump"]]


def test_what_is_no_number_is_no_jump_beside_a_rule_on_that() -> None:
    """Else a way back, for a jump, would always be done in the place of what is asked for a loss that is NaN."""
    back = msgspec.structs.replace(A_JUMP, then=RuleAction.ROLL_BACK, steps=5)
    other = msgspec.structs.replace(A_NUMBER, value="grad_norm")
    noisy = [1.0 + 0.01 * (step % 5) for step in range(20)]
    assert judged([back, A_NUMBER], [*noisy, NAN, 1.5])[20:] == [["a_number"], ["a_jump"]]
    assert judged([back, other], [*noisy, NAN])[20:] == [["a_jump"]]


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
    stop = JobRule("stop", RuleAction.STOP, value="loss", not_finite=True)
    judge = Judge([stop, as_report(msgspec.structs.replace(A_NUMBER, name="told")), A_NUMBER])
    breaches = judge.judge(0, {"loss": NAN}, 0.0)
    assert [each.rule.name for each in breaches] == ["told", "a_number", "stop"]
    assert judge.acting[worst(breaches) - 1] is stop


def test_slow_is_what_stays_slow() -> None:
    slow = JobRule("slow", RuleAction.REPORT, value="loss", slow=Slow(per_second=10.0, for_s=3.0))
    assert judged([slow], [5.0, 5.0, 5.0, 20.0, 5.0, 5.0, 5.0]) == [[]] * 7
    assert judged([slow], [5.0] * 6) == [[], [], [], [], ["slow"], []]


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (JobRule("none", RuleAction.STOP, value="loss"), "one of not_finite"),
        (JobRule("two", RuleAction.STOP, value="loss", not_finite=True, above=1.0), "one of not_finite"),
        (JobRule("back", RuleAction.ROLL_BACK, value="loss", not_finite=True), "steps: at least 1"),
        (JobRule("far", RuleAction.STOP, value="loss", not_finite=True, steps=3), "steps: at least 1"),
        (JobRule("slow", RuleAction.SKIP_BATCH, value="loss", slow=Slow(1.0, 1.0)), "does not make anything faster"),
        (JobRule("neither", RuleAction.STOP), "one of value and line"),
        (JobRule("both", RuleAction.STOP, value="loss", line="nan", not_finite=True), "one of value and line"),
        (JobRule("line", RuleAction.STOP, line="nan", above=1.0), "a line has none"),
        (JobRule("line", RuleAction.SKIP_BATCH, line="nan"), "allowed: report, repeat_step, stop"),
        (JobRule("line", RuleAction.ROLL_BACK, line="nan", steps=5), "allowed: report, repeat_step, stop"),
        (JobRule("line", RuleAction.STOP, line="(a+)+"), "line: repeats a group"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(rule: JobRule, wrong: str) -> None:
    (problem,) = broken_rules(Policy(rules=(rule,)))
    assert problem.key == "rules[0]"
    assert wrong in problem.text


def test_the_name_of_a_key_is_no_name_of_a_rule() -> None:
    taken = msgspec.structs.replace(A_NUMBER, name="out_of_memory")
    assert [each.key for each in broken_rules(Policy(rules=(taken,)))] == ["rules[0].name"]


def test_two_rules_of_one_name_are_refused() -> None:
    assert [each.key for each in broken_rules(Policy(rules=(A_NUMBER, A_NUMBER)))] == ["rules[1].name"]


def test_no_more_rules_on_lines_than_are_quickly_looked_at() -> None:
    many = tuple(JobRule(f"line_{number}", RuleAction.REPORT, line="nan") for number in range(17))
    assert [each.text for each in broken_rules(Policy(rules=many))] == ["found 17 on lines; allowed: up to 16"]
    assert not broken_rules(Policy(rules=many[:16]))


def test_a_rule_on_lines_is_not_for_the_rank() -> None:
    line = JobRule("a_line", RuleAction.STOP, line="nan")
    assert judge_of([line], object()) is None  # type: ignore[arg-type]
    judge = Judge([line, A_NUMBER])
    assert judge.acting == (A_NUMBER,)
    assert [each.number for each in judge.judge(0, {"loss": NAN}, 0.0)] == [1]


# --- the machine ------------------------------------------------------------------------------------------------------


def job(rule: JobRule) -> FakeCluster:
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
    rule = JobRule("a_number", RuleAction.ROLL_BACK, value="loss", not_finite=True, steps=3)
    cluster = job(rule)
    cluster.feed(broken(cluster, 0))
    stopped(cluster)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == DO_NOT_REQUEUE
    assert "nothing to go back to" in cluster.finish.reason


def test_going_back_takes_the_checkpoint_before_and_leaves_out_the_data_since_then() -> None:
    rule = JobRule("a_number", RuleAction.ROLL_BACK, value="loss", not_finite=True, steps=3)
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


def test_a_second_rank_without_memory_that_is_stopped_already_costs_no_second_batch() -> None:
    """It says so when it has heard of the next generation; the step that it means is the one of the first."""
    cluster = FakeCluster().start()
    first = cluster.fault(1, FaultKind.RULE, code="out_of_memory", trusted_step=8, mendable=True)
    session = Session(2, 1, first.report.generation)
    orders = {each.rank: each for each in only(cluster.feed(first), Quiesce)}
    assert session.hear(orders[2]).taken
    said: list[Any] = []
    generation = first.report.generation
    runtime: Any = SimpleNamespace(rank=2, node="n1", incarnation=1, session=session, trained_generation=generation)
    runtime.post = said.append
    Runtime.report_fault(runtime, FaultKind.RULE, "7 TiB", mendable=True, trusted_step=8, code="out_of_memory")
    assert not only(cluster.feed(*said), Quiesce)
    rejoin = [each for rank in range(4) for each in only(cluster.feed(cluster.quiesced(rank, 8)), Rejoin)]
    assert {each.part.leave_out for each in rejoin} == {LeaveOut(1, 0)}
    assert cluster.machine.state.rules.tallies["out_of_memory"].times == 1


def test_a_rule_that_reports_is_counted_once_however_many_ranks_say_so() -> None:
    """A throughput is low on all ranks, as they wait for each other; one may notice it a step later."""
    cluster = job(as_report(A_NUMBER))
    for rank, step in ((0, 8), (1, 9), (2, 8), (3, 9), (1, 12)):
        cluster.feed(broken(cluster, rank, step, "loss is nan"))
    assert cluster.machine.status(cluster.now).rules.tallies["a_number"].times == 2


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
    other: Any = SimpleNamespace(reports_values=True)
    if then in {RuleAction.SKIP_BATCH, RuleAction.ROLL_BACK}:
        with pytest.raises(ConfigurationError, match="a_number would leave data out, which a SimpleNamespace cannot"):
            judge_of([rule], other)
    else:
        assert judge_of([rule], other) is not None


@pytest.mark.parametrize("other", [object(), SimpleNamespace(reports_values=False)], ids=["of its own", "a trainer's"])
@pytest.mark.parametrize("then", list(RuleAction))
def test_rules_on_values_are_refused_where_no_script_reports_any(then: RuleAction, other: Any) -> None:
    """Else one that is to stop the job would never do so. Rules on lines hold there as anywhere."""
    rule = msgspec.structs.replace(A_NUMBER, then=then, steps=int(then is RuleAction.ROLL_BACK))
    with pytest.raises(ConfigurationError, match=r"a_number would never be broken.*step\.report"):
        judge_of([rule], other)
    assert judge_of([JobRule("a_line", RuleAction.STOP, line="nan")], other) is None


def test_without_rules_nothing_is_judged() -> None:
    assert judge_of([], object()) is None  # type: ignore[arg-type]


# --- lines that ranks print -------------------------------------------------------------------------------------------


A_LINE = JobRule("a_number", RuleAction.REPEAT_STEP, line="link down", at_most=2)


def printed(cluster: FakeCluster, rank: int = 1, step: int = 8) -> FaultReported:
    """What the agent of a rank reports."""
    said = "printed: link down"
    return cluster.fault(rank, FaultKind.RULE, code="a_number", trusted_step=step, detail=said)


def test_a_line_has_the_step_repeated_once_however_many_ranks_print_it() -> None:
    cluster = job(A_LINE)
    said = cluster.feed(*(printed(cluster, rank) for rank in (1, 0, 3)))
    assert len(only(said, Quiesce)) == 4
    assert not only(said, StartProcess)
    assert {each.part.leave_out for each in stopped(cluster)} == {None}
    cluster.pass_barrier_two(8)
    tally = cluster.machine.state.rules.tallies["a_number"]
    assert (tally.times, tally.detail) == (1, "printed: link down")


def test_a_line_that_comes_again_and_again_ends_the_job() -> None:
    """Also where it comes in the step behind the one that was repeated: else each step would be repeated once."""
    cluster = job(A_LINE)
    for step in (8, 9):
        cluster.feed(printed(cluster, step=step))
        stopped(cluster, step)
        cluster.pass_barrier_two(step)
    assert cluster.finish is None
    cluster.feed(printed(cluster, step=10))
    goal = cluster.machine.state.saving.then
    assert isinstance(goal, Result)
    assert goal.exit_code == DO_NOT_REQUEUE
    assert "2 times in a row" in goal.reason


def test_a_line_that_comes_seldom_never_ends_the_job() -> None:
    cluster = job(A_LINE)
    for step in (8, 20, 40, 60):
        cluster.feed(printed(cluster, step=step))
        stopped(cluster, step)
        cluster.pass_barrier_two(step)
    assert cluster.machine.state.rules.tallies["a_number"].times == 4
    cluster.expect(Phase.RUNNING)


def test_a_line_that_is_to_end_the_job_is_heard_in_the_middle_of_a_recovery() -> None:
    """The rank that printed it is lost by then, and another generation has begun."""
    cluster = job(msgspec.structs.replace(A_LINE, then=RuleAction.STOP))
    said = printed(cluster)
    cluster.feed(cluster.exited(1))
    for rank in (0, 2, 3):
        cluster.feed(cluster.quiesced(rank, 8, ready=True, peers=[1]))
    assert cluster.machine.phase not in {Phase.RUNNING, Phase.SAVING}
    cluster.feed(said)
    cluster.expect(Phase.SAVING)
    goal = cluster.machine.state.saving.then
    assert isinstance(goal, Result)
    assert goal.exit_code == DO_NOT_REQUEUE
