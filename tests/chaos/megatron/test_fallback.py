"""What happens when no copy of an optimizer piece is left."""

import pytest

from midstep.protocol.types import Moment

from ..comparing import assert_same_numbers
from ..jobs import hurt
from .conftest import StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_when_all_holders_of_a_piece_are_lost_all_go_back_to_the_checkpoint(start_megatron: StartMegatron) -> None:
    """A rank and its buddy die in one step: the two others keep their processes, and the loss of steps is reported."""
    shape = Shape(tensor=2, distributed=True, bf16=True, steps=18)
    calm = start_megatron(shape)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    job = start_megatron(shape, (hurt(1, Moment.BACKWARD, 15), hurt(3, Moment.BACKWARD, 15)))
    incident = run_to_its_end(job)["incidents"][0]
    assert (incident["restore"], incident["resumed_step"], incident["steps_lost"]) == ("checkpoint", 10, 5), incident
    assert set(incident["replaced"]) == {1, 3}, incident
    assert incident["healthy_pids_kept"], incident
    assert "no clean copy of shard optimizer.rank" in " ".join(incident["reasons"]), incident
    assert_same_numbers(job.record(), calm.record())
