"""A sharded model of which two ranks hold each piece: flips are found by their votes, and all processes are kept."""

from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits

from ..comparing import finish
from ..test_integrity import assert_same_end, blamed, flip
from .conftest import PATIENCE_S, WORLD, StartSharded, undisturbed
from .test_host_copies import COPYING
from .training import Setting

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(500)]

VOTING: dict[str, Any] = {**COPYING, "integrity": {"every_steps": 1, "strikes": 100}}
A_FEW = [
    flip(2, FaultAction.FLIP_PARAMETER, 4),
    flip(3, FaultAction.FLIP_GRADIENT, 7, FlippedBits.ELEMENT),
]
ALL = [
    flip(number % WORLD, action, 4 + 4 * number, bits)
    for number, (action, bits) in enumerate(
        (action, bits)
        for action in (FaultAction.FLIP_PARAMETER, FaultAction.FLIP_MOMENT, FaultAction.FLIP_GRADIENT)
        for bits in FlippedBits
    )
]


@pytest.mark.parametrize(
    "flips", [pytest.param(A_FEW, id="a few"), pytest.param(ALL, id="all kinds and bits", marks=pytest.mark.soak)]
)
def test_pieces_that_two_ranks_hold_are_voted_on(start_sharded: StartSharded, flips: list[ArmedFault]) -> None:
    """Memory that changes comes from the other row; of an update that was wrong the repetition tells whose it was."""
    last = flips[-1].step
    assert last is not None
    setting = Setting(mesh=(2, 2), steps=last + 4)
    calm = undisturbed(start_sharded, setting)
    job = start_sharded(setting, flips, nodes=1, ranks_per_node=WORLD, policy=VOTING)
    assert job.wait(PATIENCE_S) == 0, job.said()
    assert_same_end(job.record(), calm, WORLD)
    incidents, said = finish(job)["incidents"], job.said()
    assert len(incidents) == len(flips), incidents
    for each, incident in zip(flips, incidents, strict=True):
        assert incident["pids_before"] == incident["pids_after"], incident
        assert each.step is not None
        changed = each.action is FaultAction.FLIP_PARAMETER
        assert blamed(incident) == ({each.rank} if changed else set()), incident
        assert incident["restore"] == ("replica" if changed else "host_copy"), incident
        wrong = [rank for rank in range(WORLD) if f"rank {rank} was wrong at step {each.step + 1}: the repet" in said]
        assert wrong == ([] if changed else [each.rank])
