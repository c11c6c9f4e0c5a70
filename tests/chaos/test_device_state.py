"""A rank gets back what its device gave it: the random numbers of its generator, and its environment."""

from pathlib import Path

import psutil
import pytest

from midstep.devices.kinds import device_kind
from midstep.protocol.faults import InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, STEP_S, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

NOISY = Path(__file__).with_name("device_noise.py")
STEPS = 30
# In the pass of a rank that has drawn already, and after everybody has drawn.
FAULTS = (inject(1, InjectionPoint.BACKWARD, 8), inject(2, InjectionPoint.UPDATE, 16))


def run(start_job: StartJob, root: Path, number: int, *more: str, injecting: bool = True) -> Record:
    """Run the training; `number`: of the job in this test."""
    arguments = [str(root / str(number) / "records"), str(STEPS), str(STEP_S), *more]
    job = start_job(script=NOISY, arguments=arguments, device="fake", faults=FAULTS if injecting else (), **ONE_NODE)
    incidents = finish(job)["incidents"]
    assert len(incidents) == (len(FAULTS) if injecting else 0), job.said()
    for incident, fault in zip(incidents, FAULTS, strict=False):
        assert_nobody_harmed(incident, {fault.rank})
    return job.record()


@pytest.mark.soak
def test_noise_of_the_device_is_the_same_after_a_recovery_and_only_if_its_generator_is_put_back(
    start_job: StartJob, tmp_path: Path
) -> None:
    """Survivors and newcomers draw what an undisturbed run draws; without the generator the same run differs."""
    calm = run(start_job, tmp_path, 0, injecting=False)
    assert_same_numbers(run(start_job, tmp_path, 1), calm)
    with pytest.raises(AssertionError, match="ended with other parameters"):
        assert_same_numbers(run(start_job, tmp_path, 2, "forget"), calm)


def test_agents_have_the_variables_of_the_device_from_their_start(start_job: StartJob) -> None:
    """What they import for their ranks they import in these, and once."""
    job = start_job(device="fake", steps=6, gates=[3], nodes=1, ranks_per_node=1)
    ranks = job.held_at(3).ranks
    needed = device_kind("fake").environment
    assert needed
    for rank in ranks:
        agent = psutil.Process(rank.pid).parent()
        assert agent is not None
        assert needed.items() <= agent.environ().items()
    job.open_gate(3)
    finish(job)
