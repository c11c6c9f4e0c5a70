"""Rules on a model that `fully_shard` has sharded, in two rows of two: all ranks leave out the same data.

Bits and batches are those of a run whose data never had what was left out.
"""

from typing import Any

import pytest

from midstep.protocol.types import InjectionPoint

from ..comparing import finish
from ..conftest import StartJob
from ..jobs import Job, inject
from ..test_rules import JUMPS, assert_as, assert_as_from, ruled, without

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(240)]

HYBRID: dict[str, Any] = {"mesh": (2, 2)}
NO_NUMBERS = (3, 4)  # batches whose loss is NaN: two in a row
BACK = (10, 11, 12)  # batches of steps 8, at which a checkpoint is, to 10, whose loss jumps


@pytest.fixture(scope="module")
def without_five(start_shared_job: StartJob) -> Job:
    """The job, which has ended, of a run whose data never had any of these batches."""
    return without(start_shared_job, *NO_NUMBERS, *BACK, **HYBRID)


def test_a_batch_without_a_number_is_left_out_and_for_a_jump_all_go_back(
    start_job: StartJob, without_five: Job
) -> None:
    """Of one rank; what is no number has reached the gradients of all, and no parameter. All processes are kept."""
    rules = [
        {"name": "a_number", "value": "loss", "not_finite": True, "then": "skip_batch"},
        {**JUMPS, "then": "roll_back", "steps": 2},
    ]
    bad = {"rank": 1, "batches": [*NO_NUMBERS, BACK[-1]], "jumps": BACK[-1:], "fails": "diverges", **HYBRID}
    job = ruled(start_job, bad, policy={"rules": rules, "checkpoint": {"every_steps": 4}})
    report = finish(job)
    skips, back = report["incidents"][:-1], report["incidents"][-1]
    assert [(each["restore"], each["steps_lost"]) for each in skips] == [("replica", 0)] * len(skips)
    assert (back["restore"], back["resumed_step"]) == ("checkpoint", 8), back
    assert all(each["pids_before"] == each["pids_after"] for each in report["incidents"])
    assert {name: each["times"] for name, each in report["rules"].items()} == {"a_number": 2, "jumps": 1}
    assert report["steps_left_out"] == len(NO_NUMBERS) + len(BACK)
    assert_as_from(job, without_five, 8, 10)


def test_a_lack_of_memory_in_the_middle_of_a_forward_pass_costs_a_batch(start_job: StartJob, without_five: Job) -> None:
    """Of two ranks, the second of which raises when all stop already: that is one batch, and one only.

    Other ranks wait in a collective. One is killed as it goes back; no other process is replaced.
    """
    bad = {"rank": 2, "late": 1, "batches": [*NO_NUMBERS, *BACK], "fails": "oom", **HYBRID}
    faults = [inject(3, InjectionPoint.ROLLBACK, 8)]
    job = ruled(start_job, bad, faults=faults, policy={"out_of_memory": "skip_batch"})
    report = finish(job)
    assert {rank for each in report["incidents"] for rank in each["replaced"]} == {3}, job.said()
    assert report["rules"]["out_of_memory"]["times"] == len(bad["batches"])
    assert report["steps_left_out"] == len(bad["batches"])
    assert_as(job, without_five)
