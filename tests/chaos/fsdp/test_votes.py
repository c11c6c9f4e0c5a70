"""A sharded model of which two ranks hold each piece: flips are found by their votes, and all processes are kept."""

from typing import Any

import pytest

from midstep.protocol.types import FaultAction, FlippedBits

from ..comparing import finish
from ..test_integrity import assert_same_end, blamed, flip
from .conftest import PATIENCE_S, WORLD, StartSharded, undisturbed
from .test_host_copies import COPYING
from .training import Setting

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(500)]

VOTING: dict[str, Any] = {**COPYING, "integrity": {"every_steps": 1, "strikes": 100}}


def test_pieces_that_two_ranks_hold_are_voted_on(start_sharded: StartSharded) -> None:
    """Memory that changes comes from the other row; of an update that was wrong the repetition tells whose it was."""
    setting = Setting(mesh=(2, 2), steps=20)
    flips = [
        flip(2, FaultAction.FLIP_PARAMETER, 5),
        flip(3, FaultAction.FLIP_GRADIENT, 9, FlippedBits.ELEMENT),
        flip(0, FaultAction.FLIP_MOMENT, 13, FlippedBits.TENSOR),
    ]
    calm = undisturbed(start_sharded, setting)
    job = start_sharded(setting, flips, nodes=1, ranks_per_node=WORLD, policy=VOTING)
    assert job.wait(PATIENCE_S) == 0, job.said()
    assert_same_end(job.record(), calm, WORLD)
    said = job.said()
    changed, *undecided = finish(job)["incidents"]
    assert (blamed(changed), changed["restore"]) == ({2}, "replica"), changed
    assert [each["restore"] for each in undecided] == ["host_copy"] * 2, undecided
    assert [rank for rank in range(WORLD) if f"rank {rank} was wrong at step" in said] == [0, 3]
    for incident in (changed, *undecided):
        assert incident["pids_before"] == incident["pids_after"], incident
