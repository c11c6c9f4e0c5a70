"""Ranks that hold something wrong without knowing it are found by votes, and brought back in place, bit for bit."""

from collections.abc import Sequence
from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import ROOMY, Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

VOTING: dict[str, Any] = {**ROOMY, "integrity": {"every_steps": 1, "strikes": 100}}
COPYING: dict[str, Any] = {**VOTING, "restore": ["replica", "host_copy", "checkpoint"], "host_copy": {"every_steps": 1}}
STEPS = 40
PLACES = {
    FaultAction.FLIP_PARAMETER: InjectionPoint.FORWARD,
    FaultAction.FLIP_MOMENT: InjectionPoint.UPDATE,
    FaultAction.FLIP_GRADIENT: InjectionPoint.UPDATE,
}


def flip(rank: int, action: FaultAction, step: int, bits: FlippedBits = FlippedBits.ONE) -> ArmedFault:
    """Return a flip at the place where it is most like what happens by itself."""
    return ArmedFault(rank, action, PLACES[action], step, bits=bits)


def run(start_job: StartJob, ranks: int, faults: Sequence[ArmedFault], **options: Any) -> Job:
    """Run a job with these flips, and one without midstep's help needed; both end with the same bits."""
    shape = {"nodes": 1, "ranks_per_node": ranks, "steps": STEPS}
    calm = start_job(**shape)
    assert calm.wait() == 0, calm.said()
    job = start_job(faults=faults, **{**shape, "policy": VOTING, **options})
    assert job.wait() == 0, job.said()
    assert_same_end(job.record(), calm.record(), ranks)
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


def test_of_two_that_differ_the_repetition_tells_who_was_wrong(start_job: StartJob) -> None:
    """Both go back in place to their copies of the state that was equal. Memory that changes needs no majority."""
    flips = [flip(1, FaultAction.FLIP_GRADIENT, 6, FlippedBits.ELEMENT), flip(0, FaultAction.FLIP_PARAMETER, 14)]
    job = run(start_job, 2, flips, policy=COPYING)
    report = finish(job)
    undecided, changed = report["incidents"]
    assert {each["kind"] for each in undecided["reports"]} == {"copies_differ"}, undecided
    assert (undecided["restore"], undecided["steps_lost"]) == ("host_copy", 1), undecided
    assert (blamed(changed), changed["restore"]) == ({0}, "replica"), changed
    for incident in (undecided, changed):
        assert (incident["outcome"], incident["pids_before"]) == ("resumed", incident["pids_after"]), incident
