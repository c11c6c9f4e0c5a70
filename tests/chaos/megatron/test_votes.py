"""Two data parallel ranks of a Megatron job hold the same, and vote on it: flips are found, and both are brought back
in place.
"""

from typing import Any

import pytest

from midstep.protocol.types import FaultAction, FlippedBits

from ..test_integrity import assert_same_end, blamed, flip
from .conftest import POLICY, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1800)]

WORLD = 2
VOTING: dict[str, Any] = {
    **POLICY,
    "integrity": {"every_steps": 1, "strikes": 100},
    "restore": ["replica", "host_copy", "checkpoint"],
    "host_copy": {"every_steps": 1},
}
ACTIONS = (FaultAction.FLIP_PARAMETER, FaultAction.FLIP_MOMENT, FaultAction.FLIP_GRADIENT)
KINDS = tuple((action, bits) for action in ACTIONS for bits in FlippedBits)


def test_flips_are_found_and_blamed_and_both_ranks_keep_their_processes(start_megatron: StartMegatron) -> None:
    """Memory that changes is blamed at once, and comes from the other rank; else the repetition tells who was wrong."""
    shape = Shape(world=WORLD, steps=8 + 4 * len(KINDS), bf16=True)
    flips = [flip(number % WORLD, action, 4 + 4 * number, bits) for number, (action, bits) in enumerate(KINDS)]
    one_node = {"nodes": 1, "ranks_per_node": WORLD}
    calm = start_megatron(shape, **one_node)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    job = start_megatron(shape, tuple(flips), policy=VOTING, **one_node)
    incidents = run_to_its_end(job, incidents=len(flips))["incidents"]
    assert_same_end(job.record(), calm.record(), WORLD)
    assert len(incidents) == len(flips), job.said()
    said = job.said()
    for each, incident in zip(flips, incidents, strict=True):
        assert incident["pids_before"] == incident["pids_after"], incident
        changed = each.action is FaultAction.FLIP_PARAMETER
        assert blamed(incident) == ({each.rank} if changed else set()), incident
        assert incident["restore"] == ("replica" if changed else "host_copy"), incident
        assert each.step is not None
        assert changed or f"rank {each.rank} was wrong at step {each.step + 1}: the repetition" in said
        assert f"rank {1 - each.rank} was wrong at step {each.step + 1}: the repetition" not in said
