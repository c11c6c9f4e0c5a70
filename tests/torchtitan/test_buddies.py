"""torchtitan's debug model on one dimension, with a copy of each rank's pieces at another one: no step is lost."""

from typing import Any

import pytest

from midstep.protocol.types import InjectionPoint

from ..chaos.losing import calm_record
from .conftest import PATIENCE_S, POLICY, StartTitan, check_moments
from .test_moments import SETTINGS, in_update, lost

pytestmark = pytest.mark.chaos

ON_ONE_DIMENSION = {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": 4}


def test_the_only_holder_of_its_pieces_comes_back_from_its_buddy(start_titan: StartTitan) -> None:
    """Killed in a forward pass, behind the barrier of an update, and in a backward pass."""
    settings: dict[str, Any] = {**SETTINGS, **ON_ONE_DIMENSION}
    moments = [lost(1, InjectionPoint.FORWARD, 2), in_update(2, 4), lost(3, InjectionPoint.BACKWARD, 6)]
    calm = calm_record(start_titan(settings, []), PATIENCE_S)
    job = check_moments(start_titan, settings, moments, calm, policy={**POLICY, "replica": "buddy"})
    assert "replica buddy: a copy of the piece of rank" in job.said()
