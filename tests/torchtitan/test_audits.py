"""Rows of torchtitan's debug model repeat each other's steps, with no line of torchtitan changed."""

from typing import Any

import pytest

from midstep.protocol.types import FaultAction, FlippedBits, InjectionPoint

from ..chaos.comparing import assert_same_numbers, finish
from ..chaos.losing import calm_record
from ..chaos.test_audits import blamed, flip
from .conftest import PATIENCE_S, POLICY, WORLD, Moment, StartTitan
from .test_moments import SETTINGS

pytestmark = pytest.mark.chaos

AUDITS: dict[str, Any] = {**POLICY, "integrity": {"every_steps": 1, "audit_steps": 2, "strikes": 100}}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_wrong_gradient_is_blamed_on_its_rank_and_on_no_other_of_its_row(start_titan: StartTitan, mode: str) -> None:
    """The loss is divided by the tokens of all ranks, which a repetition counts as well; and parameters are voted on.

    The thread of an asynchronous checkpoint does its collectives beside the repetitions.
    """
    settings = {**SETTINGS, "checkpoint.async_mode": mode}
    flips = (
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 4, bits=FlippedBits.TENSOR),
        flip(3, FaultAction.FLIP_PARAMETER, InjectionPoint.FORWARD, 5),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 8, bits=FlippedBits.SIGN),
    )
    calm = calm_record(start_titan(settings, []), PATIENCE_S)
    job = start_titan(settings, [Moment(each.rank, each.step or 0, fault=each) for each in flips], policy=AUDITS)
    assert job.wait(PATIENCE_S) == 0, job.said()
    incidents = finish(job)["incidents"]
    assert len(incidents) == len(flips), job.said()
    assert all(incident["pids_before"] == incident["pids_after"] for incident in incidents)
    assert incidents[1]["reports"][0]["rank"] == 3, incidents[1]
    assert blamed(job) == {(1, 4), (2, 8)}, job.said()
    assert "it is written again" not in job.said()
    assert_same_numbers(job.record(), calm, ranks=WORLD)
