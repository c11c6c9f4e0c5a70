"""A Megatron job whose replacements have built groups, model and optimizer before the kill."""

import pytest

from midstep.protocol.types import InjectionPoint

from ..built import built, wait_until_built
from ..comparing import assert_nobody_harmed, assert_same_numbers
from ..jobs import inject
from .conftest import POLICY, PRELOAD, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1800)]

SHAPE = Shape(tensor=2, distributed=True, bf16=True, steps=18)
KILLS = {8: 1, 14: 2}


def test_a_process_that_was_built_ahead_takes_its_rank_and_no_bit_changes(start_megatron: StartMegatron) -> None:
    calm = start_megatron(SHAPE, nodes=1, ranks_per_node=SHAPE.world)
    assert not run_to_its_end(calm)["incidents"], calm.said()
    faults = tuple(inject(rank, InjectionPoint.BACKWARD, step) for step, rank in KILLS.items())
    gates = [step - 1 for step in KILLS]
    policy = {**POLICY, "standby": {"preload": PRELOAD, "depth": "built"}}
    job = start_megatron(SHAPE, faults, policy=policy, gates=gates)
    for kills, step in enumerate(gates):
        job.held_at(step)
        wait_until_built(job, SHAPE.world + kills)
        job.open_gate(step)

    incidents = run_to_its_end(job, incidents=len(KILLS))["incidents"]

    assert len(incidents) == len(KILLS), job.said()
    for (step, rank), incident in zip(KILLS.items(), incidents, strict=True):
        assert_nobody_harmed(incident, {rank})
        assert incident["resumed_step"] == step
        assert built(job)[incident["pids_after"][str(rank)]] == rank
    assert_same_numbers(job.record(), calm.record())
