"""Rules on lines of the log hold in a Megatron job as in any other: they ask nothing of its script."""

from typing import Any

import msgspec
import pytest

from ..comparing import assert_nobody_harmed, assert_same_numbers
from .conftest import POLICY, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1800)]

WORLD = 2
ONE_NODE: dict[str, Any] = {"nodes": 1, "ranks_per_node": WORLD}
SHAPE = Shape(world=WORLD, distributed=True, bf16=True, steps=12)


def test_a_line_has_the_step_repeated(start_megatron: StartMegatron) -> None:
    """Gradients are reduced by then, and no update is applied; processes are kept, and no bit differs."""
    rules = [{"name": "link_down", "line": r"link \d+ of .* is down", "then": "repeat_step"}]
    job = start_megatron(msgspec.structs.replace(SHAPE, prints_at=6), policy={**POLICY, "rules": rules}, **ONE_NODE)
    report = run_to_its_end(job)
    (incident,) = report["incidents"]
    assert_nobody_harmed(incident, set(), ranks=WORLD)
    assert "printed: link 3 of rank 1 is down" in [each["detail"] for each in incident["reports"]]
    assert report["rules"]["link_down"]["times"] == 1
    calm = start_megatron(SHAPE, **ONE_NODE)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    assert_same_numbers(job.record(), calm.record(), ranks=WORLD)
