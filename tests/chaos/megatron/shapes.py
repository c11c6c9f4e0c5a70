"""The shapes of Megatron jobs that lose ranks, and when which rank of them is killed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

from midstep.protocol.types import ArmedFault, InjectionPoint

from ..jobs import inject
from .training import Shape

INJECTION_POINTS = (
    InjectionPoint.FORWARD,
    InjectionPoint.BACKWARD,
    InjectionPoint.REDUCTION,
    InjectionPoint.BARRIER,
    InjectionPoint.UPDATE,
    InjectionPoint.GATHER,
    InjectionPoint.CHECKPOINT,
)
BETWEEN_KILLS = 3  # steps: the one that is repeated, and one that is whole, so that each kill is an incident of its own
EVERY_STEPS = (
    len(INJECTION_POINTS) * BETWEEN_KILLS
)  # between checkpoints: one comes when a rank has died at all other moments
FIRST = 2

DAILY: dict[str, Shape] = {
    "data 4, plain, fp32, batch size ramp-up": Shape(micro_batches=3, ramp_up=(8, 8, 96)),
    "data 4, 2 instances, fp16 with skipped steps": Shape(fp16=True, distributed=True, instances=2),
    "interleaved pipeline 2 x data 2, plain, fp32, overlap": Shape(pipeline=2, virtual=2, layers=4, overlap=True),
    "expert 2 x data 2, a buddy, fp32": Shape(expert=2, experts=4, distributed=True),
    "tensor 2 x data 2, a buddy that keeps its copy in host memory, bf16, overlap": Shape(
        tensor=2, bf16=True, overlap=True, distributed=True, replica="buddy_host"
    ),
    "context 2 x data 2, plain, bf16": Shape(context=2, bf16=True),
    "tensor 2 x pipeline 2 x data 2, a buddy, bf16": Shape(world=8, tensor=2, pipeline=2, distributed=True, bf16=True),
}
# Left out by `make test` for their time; `make test SUITE=soak` runs them. `make test` has a kill at each moment in the
# shape that is left, tensor parallelism and a buddy in `test_fallback.py`, a pipeline and a copy in host memory in
# `test_start.py`.
LATER = {
    "data 4, plain, fp32, batch size ramp-up",
    "expert 2 x data 2, a buddy, fp32",
    "tensor 2 x data 2, a buddy that keeps its copy in host memory, bf16, overlap",
    "interleaved pipeline 2 x data 2, plain, fp32, overlap",
    "context 2 x data 2, plain, bf16",
    "tensor 2 x pipeline 2 x data 2, a buddy, bf16",
}
A_FEW = tuple(zip(INJECTION_POINTS, (1, 2, 3, 0, 1, 2, 0), strict=True))

PLACES: dict[str, dict[str, Any]] = {
    "data 2": {"world": 2},
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
EIGHT: dict[str, Shape] = {
    "tensor 2 x pipeline 2 x data 2, a buddy, bf16, overlap": Shape(
        world=8, tensor=2, pipeline=2, distributed=True, bf16=True, overlap=True
    ),
    "tensor 2 x data 4, 2 instances, bf16, overlap": Shape(
        world=8, tensor=2, distributed=True, instances=2, bf16=True, overlap=True
    ),
    "expert 2 x pipeline 2 x data 2, a buddy, bf16": Shape(
        world=8, expert=2, experts=4, pipeline=2, distributed=True, bf16=True
    ),
    "context 2 x tensor 2 x data 2, plain, bf16": Shape(world=8, context=2, tensor=2, bf16=True),
    "tensor 2 x interleaved pipeline 2 x data 2, 2 instances, fp32, overlap": Shape(
        world=8, tensor=2, pipeline=2, virtual=2, layers=4, distributed=True, instances=2, overlap=True
    ),
    "data 8, 4 instances, fp32": Shape(world=8, distributed=True, instances=4),
}
HOST: dict[str, Shape] = {
    "tensor 2 x data 2, a buddy that keeps its copy in host memory, bf16, overlap": Shape(
        tensor=2, distributed=True, bf16=True, overlap=True, replica="buddy_host"
    ),
    "expert 2 x data 2, a buddy that keeps its copy in host memory, fp32": Shape(
        expert=2, experts=4, distributed=True, replica="buddy_host"
    ),
}
NIGHTLY: dict[str, Shape] = {
    **{
        ", ".join(names): Shape(**place, **optimizer, **further)
        for (names, (place, optimizer, further)) in (
            (tuple(name for name, _ in chosen), tuple(options for _, options in chosen))
            for chosen in product(PLACES.items(), OPTIMIZERS.items(), FURTHER.items())
        )
    },
    **HOST,
    **EIGHT,
}


class Kill(NamedTuple):
    """A kill, and the step at which all have to resume after it."""

    fault: ArmedFault
    resumed_step: int


def every_rank_at_every_moment(shape: Shape) -> list[tuple[InjectionPoint, int]]:
    """Return all that the matrix asks of a shape, rank after rank."""
    return [(point, rank) for rank, point in product(range(shape.world), INJECTION_POINTS)]


def a_few(shape: Shape) -> list[tuple[InjectionPoint, int]]:
    """Return each moment once, with the ranks taking turns."""
    return [(point, rank % shape.world) for point, rank in A_FEW]


def plan(shape: Shape, chosen: Iterable[tuple[InjectionPoint, int]]) -> list[Kill]:
    """Return a kill every few steps. Without a distributed optimizer there is no gather to be killed in."""
    planned, lives, step = [], Counter[int](), FIRST
    for point, rank in chosen:
        if point is InjectionPoint.GATHER and not shape.distributed:
            continue
        if point is InjectionPoint.CHECKPOINT:
            step = (step // EVERY_STEPS + 1) * EVERY_STEPS - 1
        lives[rank] += 1
        # A gather that overlaps with the forward pass is that of the update before.
        late = {InjectionPoint.UPDATE, InjectionPoint.CHECKPOINT} | (
            set() if shape.overlap else {InjectionPoint.GATHER}
        )
        planned.append(Kill(inject(rank, point, step, life=lives[rank]), step + (point in late)))
        step += BETWEEN_KILLS
    return planned


def told(planned: Sequence[Kill]) -> str:
    """Say which ranks are killed when, for the name of a test: moments in their order, with the ranks of each."""
    by_point = sorted((kill.fault for kill in planned), key=lambda fault: (_order(fault), fault.rank))
    return ", ".join(
        f"{point} {'+'.join(str(fault.rank) for fault in faults)}"
        for point, faults in groupby(by_point, key=lambda fault: str(fault.point))
    )


def _order(fault: ArmedFault) -> int:
    assert fault.point is not None
    return INJECTION_POINTS.index(fault.point)
