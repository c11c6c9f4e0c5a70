"""Rules on what the script reports: a step is repeated, its batch left out, or all go back and leave out the data.

Each is compared bit for bit with a run whose data never had the batches that were left out.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.rules import DO_NOT_REQUEUE
from midstep.protocol.types import FaultAction, InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, RANKS, ROOMY, Job, inject
from .test_integrity import assert_same_end

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

RULED = Path(__file__).with_name("ruled.py")
STEPS = 24
LEFT_OUT = (4, 5, 11, 17)  # batches: two in a row, and two that are alone
BACK = (10, 11, 12, 13)  # batches, from a checkpoint or copy to the broken step
JUMPS: dict[str, Any] = {"name": "jumps", "value": "loss", "jump": {"deviations": 8}}


def ruled(start: StartJob, bad: dict[str, Any], rule: dict[str, Any] | None = None, **options: Any) -> Job:
    """Start a job with one rule, on losses that are no number."""
    policy = {**ROOMY, "checkpoint": {"every_steps": 5}, **options.pop("policy", {})}
    if rule is not None:
        policy["rules"] = [{"name": "a_number", "value": "loss", "not_finite": True, **rule}]
    options = {**ONE_NODE, "steps": STEPS, **options}
    return start(policy=policy, script=RULED, more_arguments=[json.dumps(bad)], **options)


def drawn(job: Job) -> list[dict[int, int]]:
    """The batch of each committed step, by rank: each was committed once."""
    for rank in range(RANKS):
        steps = [line.split()[0] for line in (job.records / f"drawn.{rank}").read_text().splitlines()]
        assert len(set(steps)) == len(steps), steps
    return last_drawn(job)


def last_drawn(job: Job) -> list[dict[int, int]]:
    """The batch of each step, by rank: the last, of one that was committed more than once."""
    found: list[dict[int, int]] = []
    for rank in range(RANKS):
        steps = [line.split() for line in (job.records / f"drawn.{rank}").read_text().splitlines()]
        found.append({int(step): int(batch) for step, batch in steps})
    return found


def without(start: StartJob, *batches: int, **given: Any) -> Job:
    """Return the job, which has ended, whose data never had these batches. `given`: what else its script gets."""
    job = ruled(start, {"leave_out": batches, **given})
    assert not finish(job)["incidents"], job.said()
    return job


def assert_as(job: Job, other: Job) -> None:
    """The same bits in every step that was committed, of the same batches, and at the end."""
    assert_same_numbers(job.record(), other.record())
    assert drawn(job) == drawn(other)


def assert_as_from(job: Job, other: Job, target: int, broken: int) -> None:
    """The same as the other, which went from `target` on as this one did that went back there at step `broken`.

    Steps from the target to the broken one were done twice, with other batches; all others once.
    """
    mine, theirs = job.record(), other.record()
    assert_same_end(mine, theirs, RANKS)
    for rank, steps in theirs.steps.items():
        for step, found in steps.items():
            assert found <= mine.steps[rank][step], f"rank {rank} computed something else in step {step}"
            assert len(mine.steps[rank][step]) == 1 + (target <= step < broken), f"rank {rank}, step {step}"
    assert last_drawn(job) == drawn(other)


@pytest.fixture(scope="module")
def with_all(start_shared_job: StartJob) -> Job:
    """The job, which has ended, of a run in which every batch is good."""
    return without(start_shared_job)


@pytest.fixture(scope="module")
def without_some(start_shared_job: StartJob) -> Job:
    """The job, which has ended, of a run whose data never had the batches that two tests leave out."""
    return without(start_shared_job, *LEFT_OUT)


def test_a_lack_of_memory_costs_a_batch_and_no_process(start_job: StartJob, without_some: Job) -> None:
    """Also two in a row, and one in whose recovery the rank itself is killed."""
    bad = {"rank": 2, "batches": LEFT_OUT, "fails": "oom"}
    job = ruled(start_job, bad, faults=[inject(2, InjectionPoint.ROLLBACK, 14)], policy={"out_of_memory": "skip_batch"})
    report = finish(job)
    assert [each["replaced"] for each in report["incidents"]] == [[], [], [2]], job.said()
    assert report["rules"]["out_of_memory"]["times"] == 4
    assert_as(job, without_some)


@pytest.mark.soak
def test_a_step_is_repeated(start_job: StartJob, with_all: Job) -> None:
    """Twice in a row, and then its value is one; the process that computed it is kept, and no bit differs."""
    job = ruled(start_job, {"rank": 1, "batches": [7], "times": 2}, {"then": "repeat_step"})
    report = finish(job)
    (incident,) = report["incidents"]
    assert_nobody_harmed(incident, set())
    assert (report["rules"]["a_number"]["times"], len(incident["generations"])) == (2, 2)
    assert_as(job, with_all)


@pytest.mark.soak
def test_a_rule_that_reports_changes_nothing(start_job: StartJob, with_all: Job) -> None:
    job = ruled(start_job, {"rank": 1, "batches": [7, 8, 13]}, {"then": "report"})
    report = finish(job)
    assert not report["incidents"]
    assert report["rules"]["a_number"]["times"] == 2  # once for the two that follow each other
    assert_as(job, with_all)


@pytest.mark.soak
def test_a_batch_whose_loss_jumps_is_left_out(start_job: StartJob, without_some: Job) -> None:
    """Only the last one, as the other rule finds what is no number; both are as bad for the gradients of all ranks.

    Ranks vote on their state in each step, and find nothing.
    """
    rules = [{"name": "a_number", "value": "loss", "not_finite": True}, JUMPS]
    policy = {"rules": [{**each, "then": "skip_batch"} for each in rules], "integrity": {"every_steps": 1}}
    job = ruled(start_job, {"rank": 2, "batches": LEFT_OUT, "jumps": [17], "fails": "diverges"}, policy=policy)
    report = finish(job)
    assert {name: each["times"] for name, each in report["rules"].items()} == {"a_number": 3, "jumps": 1}
    assert all(each["pids_before"] == each["pids_after"] for each in report["incidents"])
    assert_as(job, without_some)


def test_a_job_that_a_rule_stops_is_not_to_be_started_again(start_job: StartJob) -> None:
    """Its exit code says so, and what was committed before is saved."""
    job = ruled(start_job, {"rank": 1, "batches": [8]}, {"then": "stop"}, ranks_per_node=2)
    assert job.wait() == DO_NOT_REQUEUE, job.said()
    (incident,) = job.report()["incidents"]
    assert incident["outcome"] == "stopped"
    assert (job.directory / "checkpoints" / "step-00000008").is_dir()


def on_lines(start: StartJob, bad: dict[str, Any], then: str, **options: Any) -> Job:
    """Start a job with one rule, on lines that a rank prints."""
    rules = [{"name": "link_down", "line": r"link \d+ of .* is down", "then": then}]
    return ruled(start, bad, policy={"rules": rules}, **options)


def test_a_line_that_a_rank_prints_as_it_exits_ends_the_job(start_job: StartJob) -> None:
    """Its process is not started again, and the exit code says that the job is not to be."""
    job = on_lines(start_job, {"rank": 1, "batches": [8], "fails": "exits"}, "stop", ranks_per_node=2)
    assert job.wait() == DO_NOT_REQUEUE, job.said()
    (incident,) = job.report()["incidents"]
    assert incident["outcome"] == "stopped"
    assert "rule link_down on lines of the log is broken at step 8" in incident["ended_reason"]
    assert not incident["replaced"]


@pytest.mark.soak
def test_a_line_has_the_step_repeated(start_job: StartJob, with_all: Job) -> None:
    """The step in which it is seen, in the living processes; no bit differs."""
    job = on_lines(start_job, {"rank": 1, "batches": [7], "times": 1, "fails": "prints"}, "repeat_step", step_s=0.1)
    (incident,) = finish(job)["incidents"]
    assert_nobody_harmed(incident, set())
    assert "printed: link 3 of rank 1 is down" in [each["detail"] for each in incident["reports"]]
    assert_as(job, with_all)


@pytest.mark.soak
def test_lines_that_are_only_reported_change_nothing(start_job: StartJob, with_all: Job) -> None:
    """One of those that come one after another is reported."""
    job = on_lines(start_job, {"rank": 1, "batches": [7, 8, 9], "fails": "prints"}, "report", step_s=0.1)
    report = finish(job)
    assert not report["incidents"]
    assert report["rules"]["link_down"]["times"] == 1
    assert_as(job, with_all)


@pytest.mark.soak
def test_a_throughput_that_is_too_low_for_a_while_is_reported_once(start_job: StartJob, with_all: Job) -> None:
    """Of all ranks, as they wait for each other; one slow step alone is nothing."""
    rules = [{"name": "too_slow", "value": "samples", "slow": {"per_second": 20, "for_s": 1.2}, "then": "report"}]
    dawdling = {"rank": 1, "batches": [4, *range(9, 14)], "fails": "dawdles"}
    job = ruled(start_job, dawdling, policy={"rules": rules}, step_s=0.02)
    report = finish(job)
    assert not report["incidents"]
    assert report["rules"]["too_slow"]["times"] == 1
    assert_as(job, with_all)


@pytest.mark.soak
def test_what_does_not_help_so_often_in_a_row_stops_the_job(start_job: StartJob) -> None:
    job = ruled(start_job, {"rank": 3, "batches": [8, 9, 10]}, {"then": "skip_batch", "at_most": 2})
    assert job.wait() == DO_NOT_REQUEUE, job.said()
    assert "2 times in a row" in job.report()["incidents"][-1]["ended_reason"]


@pytest.fixture(scope="module")
def without_four(start_shared_job: StartJob) -> Job:
    """The job, which has ended, of a run whose data never had what those that go back leave out."""
    return without(start_shared_job, *BACK)


@pytest.mark.parametrize("killed", [pytest.param(None, marks=pytest.mark.soak), 2], ids=["undisturbed", "killed"])
def test_all_go_back_and_leave_out_the_data_since_then(
    start_job: StartJob, without_four: Job, killed: int | None
) -> None:
    """To the checkpoint of step 10: from the one whose value is no number, at 13, data is left out back to there."""
    faults = [] if killed is None else [inject(killed, InjectionPoint.ROLLBACK, 13)]
    job = ruled(start_job, {"rank": 0, "batches": [13]}, {"then": "roll_back", "steps": 2}, faults=faults)
    report = finish(job)
    (incident,) = report["incidents"]
    assert incident["resumed_step"] == 10
    assert incident["restore"] in {"checkpoint", "replica"}
    assert report["steps_left_out"] == 4
    assert_as_from(job, without_four, 10, 13)


@pytest.mark.soak
def test_all_go_back_to_their_copies_in_host_memory_for_a_jump(start_job: StartJob, without_four: Job) -> None:
    """To those of step 10, of two that are kept; no checkpoint is read, and none was written."""
    policy = {
        "restore": ["replica", "host_copy", "checkpoint"],
        "host_copy": {"every_steps": 3},
        "checkpoint": {"every_steps": 0},
        "rules": [{**JUMPS, "then": "roll_back", "steps": 2}],
    }
    job = ruled(start_job, {"rank": 0, "batches": [13], "jumps": [13], "fails": "diverges"}, policy=policy, step_s=0.1)
    report = finish(job)
    (incident,) = report["incidents"]
    assert (incident["restore"], incident["resumed_step"], incident["replaced"]) == ("host_copy", 10, []), incident
    assert incident["pids_before"] == incident["pids_after"], incident
    assert (report["rules"]["jumps"]["times"], report["steps_left_out"]) == (1, len(BACK))
    assert_as_from(job, without_four, 10, 13)


@pytest.mark.soak
def test_a_controller_that_takes_over_leaves_the_same_out(start_job: StartJob) -> None:
    """It is killed when all ranks have stopped for the broken rule, and the next one makes the plan."""
    faults = [inject(1, InjectionPoint.CLEAN, 6, action=FaultAction.STOP)]  # holds barrier one open
    job = ruled(start_job, {"rank": 2, "batches": [6]}, {"then": "skip_batch"}, faults=faults)
    status = job.until(lambda status: status.phase == "quiescing", "the stop for the rule")
    os.kill(job.controller_pid(), signal.SIGKILL)
    job.until(lambda later: later.term > status.term, "the next controller")
    os.kill(status.ranks[1].pid, signal.SIGCONT)
    (incident,) = finish(job)["incidents"]
    assert_nobody_harmed(incident, set())
    assert_as(job, without(start_job, 6))


def test_a_batch_is_left_out_on_all_ranks(start_job: StartJob, without_some: Job) -> None:
    """Also two in a row, and one whose step is repeated once more as a rank, or the controller, is killed meanwhile."""
    bad = {"rank": 2, "batches": LEFT_OUT}
    faults = [inject(1, InjectionPoint.ROLLBACK, 9), inject(3, InjectionPoint.STOP, 14)]
    job = ruled(start_job, bad, {"then": "skip_batch"}, faults=faults)
    report = finish(job)
    assert len(report["incidents"]) == 3, job.said()
    assert {rank for each in report["incidents"] for rank in each["replaced"]} == {1, 3}
    assert all(each["steps_lost"] == 0 for each in report["incidents"])
    assert_as(job, without_some)
