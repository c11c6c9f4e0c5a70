"""Rows of a sharded model repeat each other's steps: a gradient that is wrong before it is reduced between them is
found, also where what is wrong has reached all ranks of its row.
"""

import os
from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from ..comparing import finish
from ..jobs import inject
from ..losing import calm_record
from ..test_audits import blamed, flip, many_flips
from ..test_integrity import assert_same_end
from .conftest import PATIENCE_S, POLICY, WORLD, Loss, StartSharded, check_losses, undisturbed
from .training import Setting

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(500)]

AUDITS: dict[str, Any] = {**POLICY, "integrity": {"audit_steps": 4, "strikes": 100}}
ONE_NODE: dict[str, Any] = {"nodes": 1, "ranks_per_node": WORLD}
FLIPS = int(os.environ.get("MIDSTEP_FLIPS", "12"))  # the table in docs/integrity.md has 100
ROWS = Setting(mesh=(2, 2), steps=24)
SETTINGS = {
    "rows and columns": ROWS,
    "two micro-batches, bf16, recomputed": Setting(mesh=(2, 2), micro_batches=2, bf16=True, recompute=True, steps=24),
    "tensor parallel rows": Setting(mesh=(2, 1), tensor=2, steps=24),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_wrong_gradient_is_blamed_on_its_rank_and_on_no_other_of_its_row(
    start_sharded: StartSharded, setting: Setting
) -> None:
    """In a layer, in the backward pass, and in a rank that repeats; and a rank is killed in a repetition."""
    flips = (
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 8, bits=FlippedBits.TENSOR),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 12, bits=FlippedBits.SIGN),
        flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 16, bits=FlippedBits.TENSOR),
    )
    calm = undisturbed(start_sharded, setting)
    job = start_sharded(setting, (*flips, inject(3, InjectionPoint.REPLAY, 20)), policy=AUDITS, **ONE_NODE)
    assert job.wait(PATIENCE_S) == 0, job.said()
    incidents = finish(job)["incidents"]
    kinds = [{each["kind"] for each in incident["reports"]} for incident in incidents[:3]]
    assert kinds == [{"gradients_differ"}] * 3, job.said()
    for incident in incidents[:3]:
        assert incident["pids_before"] == incident["pids_after"], incident
    assert [incident["replaced"] for incident in incidents] == [[], [], [], [3]], job.said()
    assert blamed(job) == {(1, 8), (2, 12), (0, 16)}
    assert_same_end(job.record(), calm, WORLD)


def test_on_the_fake_device_rows_vote_and_audit_each_other(start_sharded: StartSharded) -> None:
    """A parameter, a layer, the backward pass, a layer of the rank that repeats: each on another rank."""
    fake: dict[str, Any] = {**ONE_NODE, "device": "fake"}
    flips = (
        flip(3, FaultAction.FLIP_PARAMETER, InjectionPoint.FORWARD, 5),
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 8, bits=FlippedBits.TENSOR),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 12, bits=FlippedBits.SIGN),
        flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 16, bits=FlippedBits.TENSOR),
    )
    calm = calm_record(start_sharded(ROWS, **fake), PATIENCE_S)
    policy = {**POLICY, "integrity": {"every_steps": 1, "audit_steps": 4, "strikes": 100}}
    job = start_sharded(ROWS, flips, policy=policy, **fake)
    assert job.wait(PATIENCE_S) == 0, job.said()
    incidents = finish(job)["incidents"]
    assert len(incidents) == len(flips), job.said()
    assert all(incident["pids_before"] == incident["pids_after"] for incident in incidents)
    assert incidents[0]["reports"][0]["rank"] == 3, incidents[0]
    assert blamed(job) == {(1, 8), (2, 12), (0, 16)}
    assert_same_end(job.record(), calm, WORLD)


def test_each_of_many_wrong_gradients_is_blamed_on_its_rank(start_sharded: StartSharded) -> None:
    """All kinds, all bits, all ranks, one flip every second step."""
    flips = many_flips(WORLD, FLIPS)
    setting = Setting(mesh=(2, 2), steps=10 + 2 * FLIPS)
    calm = undisturbed(start_sharded, setting)
    policy = {**POLICY, "integrity": {"audit_steps": 1, "strikes": 1000}}
    job = start_sharded(setting, flips, policy=policy, **ONE_NODE)
    assert job.wait(PATIENCE_S) == 0, job.said()
    incidents = finish(job)["incidents"]
    assert blamed(job) == {(each.rank, each.step) for each in flips}
    assert sum(len(each["generations"]) for each in incidents) == FLIPS
    assert all(each["pids_before"] == each["pids_after"] for each in incidents)
    assert_same_end(job.record(), calm, WORLD)


def test_a_rank_of_a_row_that_is_wrong_each_time_moves_to_a_spare(start_sharded: StartSharded) -> None:
    """Of three rows: it differs in its own gradient and in the one that it repeats, and so does all of its row."""
    setting = Setting(mesh=(3, 2), steps=12)
    calm = calm_record(start_sharded(setting, nodes=1, ranks_per_node=6), PATIENCE_S)
    broken = flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 8, rate=1.0, incarnation=1)
    job = start_sharded(setting, [broken], policy=AUDITS, nodes=3, ranks_per_node=2, spares=1)
    assert job.wait(PATIENCE_S) == 0, job.said()
    (incident,) = finish(job)["incidents"]
    assert [(each["kind"], each["rank"]) for each in incident["reports"]] == [("wrong_gradient", 1)], incident
    assert (incident["decisions"][-1]["rung"], incident["steps_lost"]) == ("recover", 0)
    assert "the node is left" in incident["reports"][0]["detail"]
    assert_same_end(job.record(), calm, 6)


def test_ranks_that_are_lost_in_audited_steps_blame_no_rank(start_sharded: StartSharded) -> None:
    """In each part of a step, in a repetition, stopped by a signal; votes are held beside."""
    setting = Setting(mesh=(2, 2), steps=30)
    losses = [
        Loss((inject(1, InjectionPoint.REPLAY, 4),), {1}, 4),
        Loss((inject(2, InjectionPoint.FORWARD, 8),), {2}, 8),
        Loss((inject(0, InjectionPoint.BACKWARD, 12),), {0}, 12),
        Loss((inject(3, InjectionPoint.BARRIER, 16),), {3}, 16),
        Loss((inject(2, InjectionPoint.UPDATE, 20, life=2),), {2}, 21),
        Loss((ArmedFault(1, FaultAction.STOP, InjectionPoint.REPLAY, 24, 2),), {1}, 24),
    ]
    policy = {**POLICY, "integrity": {"every_steps": 1, "audit_steps": 2}}
    job = check_losses(start_sharded, setting, losses, policy=policy, **ONE_NODE)
    assert blamed(job) == set()


def test_a_model_of_which_there_is_one_copy_is_refused_at_the_start(start_sharded: StartSharded) -> None:
    """No other rank could repeat a step."""
    job = start_sharded(Setting(mesh=(2,), steps=4), policy=AUDITS, nodes=1, ranks_per_node=2)
    assert job.wait(PATIENCE_S) != 0
    assert "there is no second replica of the model" in job.said()
