"""A rank that does nothing at all is found by that; one that waits for an answer only when its step takes too long."""

from pathlib import Path

import pytest

from midstep.launch.reached_job import read_story
from midstep.protocol.reports import FaultReported
from midstep.protocol.types import FaultKind

from .comparing import finish
from .conftest import StartJob
from .jobs import Job

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("resting.py")
STEPS, STEP_S = 18, 0.05
LEARNS = {"stall": {"learns": True, "factor": 30}}  # so that the limit of a step is well beyond that of a rest
AT_REST = "has done nothing at all for"
TOO_LONG = "step 15 has taken"


def hang(start_job: StartJob, records: Path, how: str) -> tuple[Job, list[str]]:
    """Have rank 1 hang once; return what was reported of it."""
    records.mkdir()
    arguments = [str(records), str(STEPS), str(STEP_S), how]
    job = start_job(nodes=1, ranks_per_node=2, script=SCRIPT, arguments=arguments, policy=LEARNS)
    report = finish(job)
    assert [(each["outcome"], each["replaced"]) for each in report["incidents"]] == [("resumed", [1])], job.said()
    told = [entry.event.report for entry in read_story(job.directory) if isinstance(entry.event, FaultReported)]
    return job, [each.detail for each in told if each.kind is FaultKind.STALL]


@pytest.mark.parametrize("how", ["sleep", "deadlock"])
def test_a_rank_that_does_nothing_at_all_is_found_before_its_step_takes_too_long(
    start_job: StartJob, tmp_path: Path, how: str
) -> None:
    job, told = hang(start_job, tmp_path / "hung", how)
    assert AT_REST in told[0], job.said()
    assert not any(TOO_LONG in each for each in told), told


@pytest.mark.parametrize("how", ["receive", "write", "wait_for_helper"])
def test_a_rank_that_waits_for_an_answer_has_the_time_of_a_step(start_job: StartJob, tmp_path: Path, how: str) -> None:
    """Something may be under way, in another process or on another machine."""
    job, told = hang(start_job, tmp_path / "hung", how)
    assert TOO_LONG in told[0], job.said()
    assert not any(AT_REST in each for each in told), told
