"""What a rank has from its device comes back with it: the random numbers of its generator, and its environment."""

from pathlib import Path

import psutil
import pytest

from midstep.devices import rank_environment
from midstep.protocol.injuries import Moment

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, STEP_S, Record, hurt

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

NOISY = Path(__file__).with_name("device_noise.py")
STEPS = 30
# In the pass of a rank that has drawn already, and after everybody has drawn.
FAULTS = (hurt(1, Moment.BACKWARD, 8), hurt(2, Moment.UPDATE, 16))


def run(start_job: StartJob, root: Path, number: int, *more: str, hurting: bool = True) -> Record:
    """Run the training; `number`: of the job in this test."""
    arguments = [str(root / str(number) / "records"), str(STEPS), str(STEP_S), *more]
    job = start_job(script=NOISY, arguments=arguments, device="fake", faults=FAULTS if hurting else (), **ONE_NODE)
    incidents = finish(job)["incidents"]
    assert len(incidents) == (len(FAULTS) if hurting else 0), job.said()
    for incident, fault in zip(incidents, FAULTS, strict=False):
        assert_nobody_harmed(incident, {fault.rank})
    return job.record()


def test_noise_of_the_device_is_the_same_after_a_recovery_and_only_if_its_generator_is_put_back(
    start_job: StartJob, tmp_path: Path
) -> None:
    """Survivors and newcomers draw what an undisturbed run draws; without the generator the same run differs."""
    calm = run(start_job, tmp_path, 0, hurting=False)
    assert_same_numbers(run(start_job, tmp_path, 1), calm)
    with pytest.raises(AssertionError, match="ended with other parameters"):
        assert_same_numbers(run(start_job, tmp_path, 2, "forget"), calm)


def test_agents_have_the_variables_of_the_device_from_their_start(start_job: StartJob) -> None:
    """What they import for their ranks they import in these, and once."""
    job = start_job(device="fake", steps=6, gates=[3], **ONE_NODE)
    ranks = job.held_at(3).ranks
    needed = rank_environment("fake")
    assert needed
    for rank in ranks:
        agent = psutil.Process(rank.pid).parent()
        assert agent is not None
        assert needed.items() <= agent.environ().items()
    job.open_gate(3)
    finish(job)
