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

AUDITS: dict[str, Any] = {**POLICY, "integrity": {"audit_steps": 1, "strikes": 100}}


def test_a_wrong_gradient_is_blamed_on_its_rank_and_on_no_other_of_its_row(start_titan: StartTitan) -> None:
    """The loss is divided by the tokens of all ranks, which a repetition counts as well."""
    flips = (
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 4, bits=FlippedBits.TENSOR),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 6, bits=FlippedBits.SIGN),
    )
    calm = calm_record(start_titan(SETTINGS, []), PATIENCE_S)
    job = start_titan(SETTINGS, [Moment(each.rank, each.step or 0, fault=each) for each in flips], policy=AUDITS)
    assert job.wait(PATIENCE_S) == 0, job.said()
    for incident in finish(job)["incidents"]:
        assert incident["pids_before"] == incident["pids_after"], incident
    assert blamed(job) == {(1, 4), (2, 6)}, job.said()
    assert_same_numbers(job.record(), calm, ranks=WORLD)
