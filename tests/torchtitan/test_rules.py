"""A rule on the gradient norm of torchtitan, which is reported with no line of it changed."""

from typing import Any

import pytest

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.losing import calm_record
from .conftest import PATIENCE_S, POLICY, WORLD, Moment, StartTitan
from .test_moments import SETTINGS

pytestmark = pytest.mark.chaos

BAD = 4  # of torchtitan's steps, from 1
NORM: dict[str, Any] = {"name": "norm", "value": "grad_norm", "not_finite": True, "then": "skip_batch"}


def at(rank: int, place: str) -> Moment:
    """Return what happens to a rank in the bad step."""
    return Moment(rank, BAD, loss={"rank": rank, "place": place, "step": BAD})


def test_a_batch_whose_gradients_are_no_number_is_left_out(start_titan: StartTitan) -> None:
    """On all ranks, two batches each as they accumulate; the end is that of data that never had them."""
    without = [at(rank, "skips") for rank in range(WORLD)]
    calm = calm_record(start_titan(SETTINGS, without), PATIENCE_S)
    job = start_titan(SETTINGS, [at(1, "diverges")], policy={**POLICY, "rules": [NORM]})
    assert job.wait(PATIENCE_S) == 0, job.said()
    report = job.report()
    (incident,) = report["incidents"]
    assert_nobody_harmed(incident, set(), ranks=WORLD)
    assert report["rules"]["norm"]["times"] == 1
    assert_same_numbers(job.record(), calm, ranks=WORLD)
