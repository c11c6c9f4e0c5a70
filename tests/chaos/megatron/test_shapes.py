"""A rank is killed at every moment of a step, in Megatron jobs of every shape, and nothing changes but its process."""

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import msgspec
import pytest

from midstep.protocol.types import ArmedFault, Moment

from ..comparing import assert_nobody_harmed, assert_same_numbers
from ..jobs import RANKS, hurt
from .conftest import StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

DAILY: dict[str, Shape] = {
    "data 4, batch size ramp-up": Shape(micro_batches=3, ramp_up=(8, 8, 96)),
    "data 4, fp16 with skipped steps, 2 optimizer instances": Shape(fp16=True, distributed=True, instances=2),
    "tensor 2 x data 2, bf16, overlap, 2 optimizer instances": Shape(
        tensor=2, bf16=True, overlap=True, distributed=True, instances=2
    ),
    "tensor 2 x data 2, bf16, overlap, a buddy": Shape(tensor=2, bf16=True, overlap=True, distributed=True),
    "pipeline 2 x data 2, interleaved": Shape(pipeline=2, virtual=2, layers=4),
    "expert 2 x data 2, a buddy": Shape(expert=2, experts=4, distributed=True),
    "tensor 2 x data 2, bf16, a buddy that keeps its copy in host memory": Shape(
        tensor=2, bf16=True, distributed=True, replica="buddy_host"
    ),
    "context 2 x data 2, bf16": Shape(context=2, bf16=True),
}
PLACES: dict[str, dict[str, Any]] = {
    "data 4": {},
    "tensor 2 x data 2": {"tensor": 2},
    "pipeline 2 x data 2": {"pipeline": 2},
    "interleaved pipeline 2 x data 2": {"pipeline": 2, "virtual": 2, "layers": 4},
    "expert 2 x data 2": {"expert": 2, "experts": 4},
    "context 2 x data 2": {"context": 2},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "2 instances": {"distributed": True, "instances": 2},
    "a buddy": {"distributed": True},
}
FURTHER: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp32, overlap": {"overlap": True},
    "bf16, overlap": {"bf16": True, "overlap": True},
}
NIGHTLY: dict[str, Shape] = {
    ", ".join(names): Shape(**place, **optimizer, **further)
    for (names, (place, optimizer, further)) in (
        (tuple(name for name, _ in chosen), tuple(options for _, options in chosen))
        for chosen in product(PLACES.items(), OPTIMIZERS.items(), FURTHER.items())
    )
}
MOMENTS = (Moment.FORWARD, Moment.BACKWARD, Moment.REDUCTION, Moment.BARRIER, Moment.UPDATE, Moment.GATHER)
EVERY_STEPS = 10  # between checkpoints, see ROOMY
A_FEW = tuple(zip((*MOMENTS, Moment.CHECKPOINT), (1, 2, 3, 0, 1, 2, 0), strict=True))
ALL_OF_THEM = tuple(product((*MOMENTS, Moment.CHECKPOINT), range(RANKS)))


def kills(shape: Shape, chosen: Iterable[tuple[Moment, int]]) -> list[tuple[ArmedFault, int]]:
    """Return a kill every few steps, each with the step at which all resume."""
    planned, lives, step = [], Counter[int](), 2
    for moment, rank in chosen:
        if moment is Moment.GATHER and not shape.distributed:
            continue
        if moment is Moment.CHECKPOINT:
            step = (step // EVERY_STEPS + 1) * EVERY_STEPS - 1
        lives[rank] += 1
        # A gather that overlaps with the forward pass is that of the update before.
        late = {Moment.UPDATE, Moment.CHECKPOINT} | (set() if shape.overlap else {Moment.GATHER})
        planned.append((hurt(rank, moment, step, life=lives[rank]), step + (moment in late)))
        step += 3
    return planned


def check(start_megatron: StartMegatron, shape: Shape, chosen: Iterable[tuple[Moment, int]]) -> None:
    """Run a shape with and without kills, and compare."""
    planned = kills(shape, chosen)
    shape = msgspec.structs.replace(shape, steps=planned[-1][1] + 2)
    calm = start_megatron(shape)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    job = start_megatron(shape, tuple(fault for fault, _ in planned))
    incidents: list[dict[str, Any]] = run_to_its_end(job)["incidents"]
    assert len(incidents) == len(planned), job.said()
    for incident, (fault, step) in zip(incidents, planned, strict=True):
        assert_nobody_harmed(incident, {fault.rank})
        assert incident["resumed_step"] == step, (fault, incident)
    assert_same_numbers(job.record(), calm.record())


@pytest.mark.parametrize("shape", DAILY.values(), ids=list(DAILY))
def test_a_kill_at_any_moment_of_a_step_changes_no_bit(start_megatron: StartMegatron, shape: Shape) -> None:
    """Only the killed rank is replaced, no committed step is lost, and the run ends as an undisturbed one."""
    check(start_megatron, shape, A_FEW)


@pytest.mark.soak
@pytest.mark.parametrize("shape", NIGHTLY.values(), ids=list(NIGHTLY))
def test_a_kill_of_any_rank_at_any_moment_changes_no_bit(start_megatron: StartMegatron, shape: Shape) -> None:
    """Likewise every rank at every moment, in all shapes."""
    check(start_megatron, shape, ALL_OF_THEM)
