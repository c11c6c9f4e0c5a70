"""Values that a script changes after its update block, and what ranks hold under one name."""

from pathlib import Path

import pytest

from midstep.protocol.rules import DO_NOT_REQUEUE
from midstep.protocol.types import FaultAction, InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import RANKS, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("running_mean.py")
STEPS, STEP_S = 40, 0.01
FAULTS = (
    inject(1, InjectionPoint.FORWARD, 3),
    inject(2, InjectionPoint.BACKWARD, 7),
    inject(0, InjectionPoint.BARRIER, 11),
    inject(3, InjectionPoint.FORWARD, 15, action=FaultAction.RAISE),
    inject(1, InjectionPoint.FORWARD, 19, life=2),
    inject(2, InjectionPoint.BARRIER, 23, life=2),
    inject(3, InjectionPoint.BACKWARD, 27, life=2),
)


def test_a_running_mean_behind_the_update_counts_every_step_once_through_seven_recoveries(start_job: StartJob) -> None:
    """On survivors and on ranks that were replaced, to the bit; and the audit names it, with what else is too late."""
    calm, job = (start_job(nodes=1, ranks_per_node=RANKS, script=SCRIPT, faults=faults, steps=STEPS, step_s=STEP_S)
                 for faults in ((), FAULTS))  # fmt: skip
    assert not finish(calm)["incidents"], calm.said()

    report = finish(job)

    assert [each["outcome"] for each in report["incidents"]] == ["resumed"] * len(FAULTS), job.said()
    ends, undisturbed = job.record().ends, calm.record().ends
    assert {rank: end["steps"] for rank, end in ends.items()} == dict.fromkeys(range(RANKS), STEPS), job.said()
    assert {rank: end["mean"] for rank, end in ends.items()} == {rank: end["mean"] for rank, end in undisturbed.items()}
    for said in ("values['running'] changes in the update block or after it", "scheduler changes after the update"):
        assert all(any(sentence.startswith(said) for sentence in end["audit"]) for end in ends.values()), ends
        assert said in (job.directory / "logs" / "rank-0.1.log").read_text()


def test_ranks_that_hold_different_parameters_are_refused_before_one_overwrites_another(
    start_job: StartJob, tmp_path: Path
) -> None:
    """The job ends at once, no process is restarted for it, and its reason says what differs between whom."""
    job = start_job(nodes=1, ranks_per_node=2, script=SCRIPT, arguments=[str(tmp_path), "40", "0.01", "unequal"])
    assert job.wait() == DO_NOT_REQUEUE, job.said()
    report = job.report()
    assert "ranks 0 and 1 hold different parameters" in report["reason"], report["reason"]
    assert [each["replaced"] for each in report["incidents"]] == [[]]
