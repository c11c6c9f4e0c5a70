"""Ranks are killed at every moment of a step, in Megatron jobs of every shape, and nothing changes but their processes.

The name of a test says the shape, and after the colon which ranks are killed when: each kill is an incident of its own,
a few steps after the one before, in one job per shape.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import InjectionPoint

from ..comparing import assert_nobody_harmed, assert_same_numbers
from ..jobs import RANKS
from .conftest import NODES, PATIENCE_S, POLICY, StartMegatron, run_to_its_end
from .shapes import DAILY, EVERY_STEPS, LATER, NIGHTLY, Kill, a_few, every_rank_at_every_moment, plan, told
from .training import Shape

pytestmark = pytest.mark.chaos

CHECKPOINTED = {**POLICY, "checkpoint": {"every_steps": EVERY_STEPS}}


def cases(shapes: dict[str, Shape], choose: Callable[[Shape], list[tuple[InjectionPoint, int]]]) -> list[Any]:
    """Return the shapes with their kills, under names that tell of both."""
    planned = {name: plan(shape, choose(shape)) for name, shape in shapes.items()}
    return [
        pytest.param(
            shapes[name], kills, id=f"{name}: {told(kills)}", marks=[pytest.mark.soak] if name in LATER else []
        )
        for name, kills in planned.items()
    ]


def check(start_megatron: StartMegatron, shape: Shape, kills: Sequence[Kill], nodes: int = NODES) -> None:
    """Run a shape with and without kills, and compare."""
    shape = msgspec.structs.replace(shape, steps=kills[-1].resumed_step + 2)
    # On one node, since an undisturbed run computes the same there, and starts sooner.
    calm = start_megatron(shape, policy=CHECKPOINTED, nodes=1, ranks_per_node=shape.world)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    faults = tuple(kill.fault for kill in kills)
    gates = [fault.step for fault in faults[1:] if fault.step is not None]
    job = start_megatron(
        shape, faults, policy=CHECKPOINTED, nodes=nodes, ranks_per_node=shape.world // nodes, gates=gates
    )
    for over, gate in enumerate(gates, start=1):  # steps are short, and two kills of one incident no case
        job.until(partial(_are_over, over), f"the end of incident {over}", PATIENCE_S)
        job.open_gate(gate)
    incidents: list[dict[str, Any]] = run_to_its_end(job, incidents=len(kills))["incidents"]
    assert len(incidents) == len(kills), job.said()
    for incident, kill in zip(incidents, kills, strict=True):
        assert_nobody_harmed(incident, {kill.fault.rank}, ranks=shape.world)
        assert incident["resumed_step"] == kill.resumed_step, (kill, incident)
    assert_same_numbers(job.record(), calm.record(), ranks=shape.world)


def _are_over(incidents: int, status: JobStatus) -> bool:
    return status.phase == "running" and len(status.incidents) == incidents


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("shape", "kills"), cases(DAILY, a_few))
def test_a_kill_at_any_injection_point_of_a_step_changes_no_bit(
    start_megatron: StartMegatron, shape: Shape, kills: list[Kill]
) -> None:
    """Only the killed rank is replaced, no committed step is lost, and the run ends as an undisturbed one.

    On one node, which imports half as much as two; the shape of eight ranks on two.
    """
    check(start_megatron, shape, kills, nodes=NODES if shape.world > RANKS else 1)


@pytest.mark.soak
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("shape", "kills"), cases(NIGHTLY, every_rank_at_every_moment))
def test_a_kill_of_any_rank_at_any_injection_point_changes_no_bit(
    start_megatron: StartMegatron, shape: Shape, kills: list[Kill]
) -> None:
    """Likewise every rank at every moment, in all shapes."""
    check(start_megatron, shape, kills)
