"""Rules in a Megatron job: on lines of the log, on the losses that its script reports, and on the gradient norm.

Each is compared bit for bit with a job whose data never had the batches that are left out.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest

from midstep.protocol.rules import DO_NOT_REQUEUE
from midstep.protocol.types import InjectionPoint

from ..comparing import assert_nobody_harmed, assert_same_numbers
from ..jobs import Job, inject
from ..test_integrity import assert_same_end
from .conftest import POLICY, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1800)]

ONE_NODE: dict[str, Any] = {"nodes": 1, "ranks_per_node": 2}
SHAPE = Shape(world=2, distributed=True, bf16=True, steps=12)
IN_STAGES = Shape(world=4, pipeline=2, tensor=1, distributed=True, bf16=True, steps=12)
LOSS: dict[str, Any] = {"name": "a_number", "value": "loss", "not_finite": True}
NORM: dict[str, Any] = {"name": "norm", "value": "grad_norm", "not_finite": True}
Without = Callable[..., Job]


def judged(start: StartMegatron, shape: Shape, policy: dict[str, Any], **options: Any) -> Job:
    """Start a job of a shape with more in its policy."""
    one_node = ONE_NODE if shape.world == SHAPE.world else {}
    return start(shape, policy={**POLICY, **policy}, **{**one_node, **options})


@pytest.fixture(scope="module")
def without(start_megatron: StartMegatron) -> Without:
    """Return the job, which has ended, whose data never had these batches. Each is run once."""

    @cache
    def run(shape: Shape, *batches: int) -> Job:
        calm = judged(start_megatron, msgspec.structs.replace(shape, left_out=batches), {})
        assert not run_to_its_end(calm)["incidents"], calm.said()
        return calm

    return run


def test_a_line_has_the_step_repeated(start_megatron: StartMegatron, without: Without) -> None:
    """Gradients are reduced by then, and no update is applied; processes are kept, and no bit differs."""
    rules = [{"name": "link_down", "line": r"link \d+ of .* is down", "then": "repeat_step"}]
    job = judged(start_megatron, msgspec.structs.replace(SHAPE, prints_at=6), {"rules": rules})
    report = run_to_its_end(job)
    (incident,) = report["incidents"]
    assert_nobody_harmed(incident, set(), ranks=SHAPE.world)
    assert "printed: link 3 of rank 1 is down" in [each["detail"] for each in incident["reports"]]
    assert report["rules"]["link_down"]["times"] == 1
    assert_same_numbers(job.record(), without(SHAPE).record(), ranks=SHAPE.world)


@pytest.mark.parametrize("shape", [SHAPE, IN_STAGES], ids=["data parallel", "in stages, of which the last reports"])
def test_a_batch_whose_loss_is_no_number_is_left_out(
    start_megatron: StartMegatron, without: Without, shape: Shape
) -> None:
    """Two in a row, and one in whose recovery a rank is killed: what is left out stays left out."""
    bad = msgspec.structs.replace(shape, bad=(3, 4, 8), reports=True)
    faults = (inject(0, InjectionPoint.ROLLBACK, 6),)
    job = judged(start_megatron, bad, {"rules": [{**LOSS, "then": "skip_batch"}]}, faults=faults)
    report = run_to_its_end(job, incidents=3)
    assert [each["replaced"] for each in report["incidents"]] == [[], [0]], job.said()
    assert report["rules"]["a_number"]["times"] == 3
    assert_same_numbers(job.record(), without(shape, 3, 4, 8).record(), ranks=shape.world)


def test_the_gradient_norm_is_reported_by_itself(start_megatron: StartMegatron, without: Without) -> None:
    """The script reports nothing. All go back to a checkpoint, and leave out what lies between."""
    bad = msgspec.structs.replace(SHAPE, bad=(7,))
    rules = [{**NORM, "then": "roll_back", "steps": 1}]
    job = judged(start_megatron, bad, {"rules": rules, "checkpoint": {"every_steps": 5}})
    report = run_to_its_end(job)
    (incident,) = report["incidents"]
    assert incident["pids_before"] == incident["pids_after"]
    assert (incident["outcome"], incident["restore"]) == ("resumed", "checkpoint"), job.said()
    assert_same_end(job.record(), without(SHAPE, 5, 6, 7).record(), SHAPE.world)


def test_a_job_is_stopped_by_a_rule_on_its_gradient_norm(start_megatron: StartMegatron) -> None:
    bad = msgspec.structs.replace(SHAPE, bad=(7,))
    job = judged(start_megatron, bad, {"rules": [{**NORM, "then": "stop"}]})
    assert job.wait() == DO_NOT_REQUEUE, job.said()
    assert job.report()["rules"]["norm"]["times"] == 1


def test_a_lack_of_memory_costs_a_batch_and_no_process(start_megatron: StartMegatron, without: Without) -> None:
    bad = msgspec.structs.replace(SHAPE, bad=(3, 4, 8), fails="oom")
    job = judged(start_megatron, bad, {"out_of_memory": "skip_batch"})
    report = run_to_its_end(job, incidents=3)
    assert all(each["pids_before"] == each["pids_after"] for each in report["incidents"]), job.said()
    assert report["rules"]["out_of_memory"]["times"] == 3
    assert_same_numbers(job.record(), without(SHAPE, 3, 4, 8).record(), ranks=SHAPE.world)
