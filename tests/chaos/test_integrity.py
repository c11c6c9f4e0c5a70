"""Ranks that hold something wrong without knowing it are found by votes, and brought back in place, bit for bit."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from midstep.controller.endpoints.control_requests import InjectRequest
from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import PATIENCE_S, ROOMY, STEP_S, Job, Record, inject
from .jobs import STEPS as UNDISTURBED_STEPS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

VOTING: dict[str, Any] = {**ROOMY, "integrity": {"every_steps": 1, "strikes": 100}}
COPYING: dict[str, Any] = {**VOTING, "restore": ["replica", "host_copy", "checkpoint"], "host_copy": {"every_steps": 1}}
STEPS = 40
RECOVERIES = int(os.environ.get("MIDSTEP_RECOVERIES", "5"))
MOST_IN_A_JOB = 250  # the kernel takes no longer environment variable
KILLED_AT = (
    InjectionPoint.FORWARD,
    InjectionPoint.BARRIER,
    InjectionPoint.UPDATE,
    InjectionPoint.BACKWARD,
    InjectionPoint.COLLECTIVE,
)
PLACES = {
    FaultAction.FLIP_PARAMETER: InjectionPoint.FORWARD,
    FaultAction.FLIP_MOMENT: InjectionPoint.UPDATE,
    FaultAction.FLIP_GRADIENT: InjectionPoint.UPDATE,
}


def flip(rank: int, action: FaultAction, step: int, bits: FlippedBits = FlippedBits.ONE) -> ArmedFault:
    """Return a flip at the place where it is most like what happens by itself."""
    return ArmedFault(rank, action, PLACES[action], step, bits=bits)


def run(
    start_job: StartJob,
    ranks: int,
    faults: Sequence[ArmedFault],
    *,
    calm: Record | None = None,
    patience_s: float = PATIENCE_S,
    **options: Any,
) -> Job:
    """Run a job with these flips, and one without midstep's help needed; both end with the same bits.

    `calm`: what the other one has written down, where it was run before.
    """
    shape = {"nodes": 1, "ranks_per_node": ranks, "steps": options.pop("steps", STEPS)}
    if calm is None:
        other = start_job(**shape, step_s=options.get("step_s", STEP_S))
        assert other.wait(patience_s) == 0, other.said()
        calm = other.record()
    job = start_job(faults=faults, **{**shape, "policy": VOTING, **options})
    assert job.wait(patience_s) == 0, job.said()
    assert_same_end(job.record(), calm, ranks)
    return job


def assert_same_end(record: Record, calm: Record, ranks: int) -> None:
    """Every rank ended with the bits of the undisturbed run, though what bits flipped in was wrong for a while."""
    assert sorted(record.ends) == list(range(ranks))
    for rank, end in record.ends.items():
        differing = [key for key, value in calm.ends[rank].items() if key != "pid" and end[key] != value]
        assert not differing, f"rank {rank} ended with other {', '.join(differing)}"


def blamed(incident: dict[str, Any]) -> set[int]:
    """Return the ranks that were found to be wrong."""
    return {report["rank"] for report in incident["reports"] if report["kind"] == "odd_copy"}


def test_the_odd_one_of_three_is_brought_back_in_place(start_job: StartJob) -> None:
    """A parameter that changes during a step, a moment, a reduced gradient: each is mended with all processes kept."""
    flips = [
        flip(1, FaultAction.FLIP_PARAMETER, 6),
        flip(2, FaultAction.FLIP_MOMENT, 12, FlippedBits.SIGN),
        flip(0, FaultAction.FLIP_GRADIENT, 18, FlippedBits.EXPONENT),
    ]
    job = run(start_job, 3, flips)
    incidents = finish(job)["incidents"]
    assert [blamed(each) for each in incidents] == [{1}, {2}, {0}], incidents
    for incident in incidents:
        assert (incident["outcome"], incident["restore"], incident["steps_lost"]) == ("resumed", "replica", 0), incident
        assert incident["pids_before"] == incident["pids_after"], incident


def test_of_two_that_differ_the_repetition_tells_who_was_wrong(start_job: StartJob, undisturbed_pair: Record) -> None:
    """Both go back in place to their copies of the state that was equal. Memory that changes needs no majority."""
    flips = [flip(1, FaultAction.FLIP_GRADIENT, 6, FlippedBits.ELEMENT), flip(0, FaultAction.FLIP_PARAMETER, 14)]
    job = run(start_job, 2, flips, calm=undisturbed_pair, steps=UNDISTURBED_STEPS, policy=COPYING)
    report = finish(job)
    undecided, changed = report["incidents"]
    assert {each["kind"] for each in undecided["reports"]} == {"copies_differ"}, undecided
    assert (undecided["restore"], undecided["steps_lost"]) == ("host_copy", 1), undecided
    assert (blamed(changed), changed["restore"]) == ({0}, "replica"), changed
    assert "rank 1 was wrong at step 7: the repetition" in job.said()
    assert "rank 0 was wrong" not in job.said()
    for incident in (undecided, changed):
        assert (incident["outcome"], incident["pids_before"]) == ("resumed", incident["pids_after"]), incident


@pytest.mark.soak
def test_a_rank_that_is_wrong_again_moves_to_a_spare_and_the_votes_go_on(start_job: StartJob) -> None:
    """The second strike is the last: its node is left. No alarm is raised for the newcomer."""
    flips = [flip(1, FaultAction.FLIP_MOMENT, step, FlippedBits.ELEMENT) for step in (6, 12)]
    policy = {**VOTING, "integrity": {"every_steps": 1, "strikes": 2}}
    job = run(start_job, 3, flips, nodes=3, ranks_per_node=1, spares=1, policy=policy)
    first, second = finish(job)["incidents"]
    assert (blamed(first), first["replaced"]) == ({1}, [])
    assert (blamed(second), second["replaced"], second["decisions"][-1]["rung"]) == ({1}, [1], "recover"), second


@pytest.mark.soak
def test_a_copy_that_is_wrong_when_it_comes_is_sent_again_before_it_is_used(start_job: StartJob) -> None:
    """A bit flips in what a survivor hands over, with a right checksum. No vote was near, and no step is lost."""
    sent = [ArmedFault(rank, FaultAction.FLIP_REPAIR, InjectionPoint.REPAIR) for rank in (1, 2)]  # one of them sends
    policy = {**VOTING, "integrity": {"every_steps": 100, "strikes": 100}}
    job = run(start_job, 3, [inject(0, InjectionPoint.FORWARD, 6), *sent], policy=policy)
    (incident,) = finish(job)["incidents"]  # it is over when the first step is
    assert (incident["replaced"], blamed(incident), incident["restore"]) == ([0], {0}, "replica"), incident
    assert (incident["outcome"], incident["steps_lost"]) == ("resumed", 0), incident


@pytest.mark.soak
@pytest.mark.timeout(600 + 8 * RECOVERIES)
def test_recoveries_raise_no_alarm(start_job: StartJob) -> None:
    """Processes are killed, and the votes of newcomers and survivors agree."""
    for left in range(RECOVERIES, 0, -MOST_IN_A_JOB):
        number_of_kills = min(left, MOST_IN_A_JOB)
        kills = [
            inject(number % 3, KILLED_AT[number % len(KILLED_AT)], 6 + 8 * number, life=1 + number // 3)
            for number in range(number_of_kills)
        ]
        patience_s = PATIENCE_S + 4 * number_of_kills
        job = run(start_job, 3, kills, steps=20 + 8 * number_of_kills, patience_s=patience_s)
        incidents = finish(job)["incidents"]
        assert len(incidents) == len(kills), incidents
        assert not any(blamed(each) for each in incidents), incidents


@pytest.mark.soak
def test_between_two_votes_all_go_back_to_the_state_that_passed_the_last_one(start_job: StartJob) -> None:
    """The odd one has computed gradients with what was wrong; the copy of the majority would not be exact."""
    flips = [flip(1, FaultAction.FLIP_MOMENT, 9, FlippedBits.SIGN), flip(2, FaultAction.FLIP_GRADIENT, 18)]
    policy = {**COPYING, "integrity": {"every_steps": 4, "strikes": 100}, "host_copy": {"every_steps": 2}}
    job = run(start_job, 3, flips, policy=policy)
    incidents = finish(job)["incidents"]
    assert [blamed(each) for each in incidents] == [{1}, {2}], incidents
    for incident in incidents:
        assert (incident["outcome"], incident["restore"]) == ("resumed", "host_copy"), incident
        assert incident["pids_before"] == incident["pids_after"], incident


@pytest.mark.soak
def test_votes_as_often_as_they_hardly_cost_anything_find_what_is_wrong(start_job: StartJob) -> None:
    """How often ranks have agreed; a new process agrees with them. The end is that of an undisturbed run."""
    faults = [
        flip(1, FaultAction.FLIP_MOMENT, 12),
        inject(0, InjectionPoint.BACKWARD, 30),
        flip(2, FaultAction.FLIP_GRADIENT, 40, FlippedBits.ELEMENT),
    ]
    policy = {**COPYING, "integrity": {"every_steps": "auto", "strikes": 100}}
    job = run(start_job, 3, faults, policy=policy, steps=60)
    incidents = finish(job)["incidents"]
    assert [blamed(each) or set(each["replaced"]) for each in incidents] == [{1}, {0}, {2}], incidents
    assert all(each["outcome"] == "resumed" for each in incidents), incidents


@pytest.mark.soak
def test_what_is_only_to_be_reported_is_left_as_it_is(start_job: StartJob) -> None:
    """Training goes on, and the odd rank stays odd."""
    policy = {**VOTING, "integrity": {"every_steps": 1, "then": "report"}}
    flips = [flip(1, FaultAction.FLIP_MOMENT, 6, FlippedBits.ELEMENT)]
    job = start_job(nodes=1, ranks_per_node=3, steps=STEPS, faults=flips, policy=policy)
    job.until(lambda status: any("rank 1 holds another" in each.report.detail for each in status.faults), "the fault")
    assert finish(job)["incidents"] == []
    ends = [end["parameters"] for _, end in sorted(job.record().ends.items())]
    assert ends[0] == ends[2] != ends[1]


@pytest.mark.soak
def test_a_repair_takes_the_copy_of_the_majority_and_says_that_it_is_not_exact(start_job: StartJob) -> None:
    """Between two votes. No step is repeated but the one of the vote."""
    policy = {**VOTING, "integrity": {"every_steps": 4, "then": "repair", "strikes": 100}}
    flips = [flip(1, FaultAction.FLIP_MOMENT, 9, FlippedBits.SIGN)]
    job = start_job(nodes=1, ranks_per_node=3, steps=STEPS, faults=flips, policy=policy)
    (incident,) = finish(job)["incidents"]
    assert (blamed(incident), incident["restore"], incident["steps_lost"]) == ({1}, "replica", 0), incident
    assert "is not exact" in incident["reports"][0]["detail"]
    assert len({end["parameters"] for end in job.record().ends.values()}) == 1


@pytest.mark.soak
def test_a_rank_that_is_wrong_in_each_update_moves_to_a_spare(start_job: StartJob) -> None:
    """Its device is; what it comes to elsewhere is right."""
    broken = ArmedFault(1, FaultAction.FLIP_GRADIENT, InjectionPoint.UPDATE, None, 1, rate=1.0)
    policy = {**VOTING, "integrity": {"every_steps": 1, "strikes": 2}}
    shape = {"nodes": 3, "ranks_per_node": 1, "steps": 12}
    calm = start_job(**shape)
    assert calm.wait() == 0, calm.said()
    job = start_job(**shape, spares=1, policy=policy, gates=[5])
    job.held_at(5)
    job.ask(InjectRequest(broken))
    job.open_gate(5)
    incidents = finish(job)["incidents"]
    assert [blamed(each) for each in incidents] == [{1}] * len(incidents)
    assert (incidents[-1]["replaced"], incidents[-1]["decisions"][-1]["rung"]) == ([1], "recover"), incidents
    assert_same_end(job.record(), calm.record(), 3)


@pytest.mark.soak
def test_a_checkpoint_of_a_state_that_fails_its_vote_is_never_complete(start_job: StartJob) -> None:
    """All go back to the one before it."""
    flips = [flip(2, FaultAction.FLIP_MOMENT, 19, FlippedBits.ELEMENT)]
    policy = {**VOTING, "integrity": {"every_steps": 1000, "strikes": 100}}
    job = run(start_job, 3, flips, policy=policy)
    (incident,) = finish(job)["incidents"]
    assert (blamed(incident), incident["restore"], incident["steps_lost"]) == ({2}, "checkpoint", 10), incident
    assert incident["pids_before"] == incident["pids_after"], incident


@pytest.mark.soak
def test_copies_that_never_are_equal_are_not_voted_on(start_job: StartJob) -> None:
    """A warning says so, and no alarm is raised."""
    script = Path(__file__).with_name("audited.py")
    job = start_job(
        nodes=1, ranks_per_node=2, script=script, steps=20, step_s=0.0, more_arguments=["drifting"], policy=VOTING
    )
    assert finish(job)["incidents"] == []
    assert "do not hold the same, and have not in any vote: it is not voted on" in job.said()


@pytest.mark.soak
def test_a_checkpoint_whose_file_has_changed_is_not_loaded(start_job: StartJob) -> None:
    """All ranks die, and go on from the one before it."""
    changed = ArmedFault(0, FaultAction.FLIP_CHECKPOINT, InjectionPoint.FORWARD, 23)
    kills = [inject(rank, InjectionPoint.UPDATE, 24) for rank in range(3)]
    job = run(start_job, 3, [changed, *kills])
    assert "is damaged" in job.said() + str(finish(job)["incidents"])
