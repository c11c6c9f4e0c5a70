"""A model that is sharded on one dimension, of whose pieces a rank of another node repeats the updates: no step is
lost with the only process that has a piece of its own.
"""

from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..comparing import assert_same_numbers, finish
from ..jobs import inject
from ..losing import calm_record
from .conftest import PATIENCE_S, POLICY, WORLD, Loss, StartSharded, check_losses, undisturbed
from .training import Setting

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(500)]

BUDDIES: dict[str, Any] = {**POLICY, "replica": "buddy", "checkpoint": {"every_steps": 0}}
ONE_NODE: dict[str, Any] = {"nodes": 1, "ranks_per_node": WORLD}


def test_the_only_holder_of_a_piece_comes_back_from_its_buddy(start_sharded: StartSharded) -> None:
    """In each part of a step, after its update, stopped by a signal; and two at once that are not each other's."""
    losses = [
        Loss((inject(1, InjectionPoint.FORWARD, 2),), {1}, 2),
        Loss((inject(2, InjectionPoint.BACKWARD, 4),), {2}, 4),
        Loss((inject(3, InjectionPoint.UPDATE, 6),), {3}, 7),
        Loss((inject(0, InjectionPoint.BARRIER, 8),), {0}, 8),
        Loss((ArmedFault(1, FaultAction.STOP, InjectionPoint.FORWARD, 10, 2),), {1}, 10),
        Loss(
            (inject(0, InjectionPoint.FORWARD, 12, life=2), inject(2, InjectionPoint.FORWARD, 12, life=2)), {0, 2}, 12
        ),
    ]
    job = check_losses(start_sharded, Setting(mesh=(WORLD,), steps=14), losses, policy=BUDDIES, **ONE_NODE)
    assert "replica buddy: a copy of the piece of rank 3" in job.said()


@pytest.mark.soak
@pytest.mark.parametrize(
    "setting",
    [
        Setting(mesh=(WORLD,), micro_batches=2, bf16=True, recompute=True),
        Setting(mesh=(2,), tensor=2),
        Setting(mesh=(WORLD,), reshard=False),
    ],
    ids=["two micro-batches, bf16, recomputed", "tensor parallel columns", "parameters that stay gathered"],
)
def test_of_each_way_to_shard_no_step_is_lost(start_sharded: StartSharded, setting: Setting) -> None:
    """A kill in a backward pass and one in an update, where each rank votes on both of its pieces in each step."""
    losses = [
        Loss((inject(1, InjectionPoint.BACKWARD, 3),), {1}, 3),
        Loss((inject(2, InjectionPoint.UPDATE, 6),), {2}, 7),
    ]
    policy = {**BUDDIES, "integrity": {"every_steps": 1}}
    check_losses(start_sharded, setting, losses, policy=policy, **ONE_NODE)


@pytest.mark.soak
def test_a_lost_node_costs_no_step(start_sharded: StartSharded) -> None:
    """Its two ranks have their buddies on the other node, and they are those of the buddies."""
    losses = [Loss((inject(2, InjectionPoint.BACKWARD, 5, action=FaultAction.KILL_NODE),), {2, 3}, 5)]
    check_losses(start_sharded, Setting(mesh=(WORLD,)), losses, policy=BUDDIES, nodes=2, ranks_per_node=2, spares=1)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("more", "source", "step"),
    [
        ({"checkpoint": {"every_steps": 4}}, "checkpoint", 4),
        ({"checkpoint": {"every_steps": 4, "format": "dcp"}}, "checkpoint", 4),
        ({"restore": ["replica", "host_copy", "checkpoint"], "host_copy": {"every_steps": 3}}, "host_copy", 3),
    ],
    ids=["safetensors", "dcp", "host copies"],
)
def test_a_rank_and_its_buddy_that_are_lost_send_all_to_the_next_source(
    start_sharded: StartSharded, more: dict[str, Any], source: str, step: int
) -> None:
    """Copies come from it as well, and are those that repeat the next updates: a rank that is lost then."""
    setting = Setting(mesh=(WORLD,))
    calm = undisturbed(start_sharded, setting)
    both = [inject(rank, InjectionPoint.FORWARD, 6) for rank in (1, 2)]
    faults = [*both, inject(3, InjectionPoint.UPDATE, 9)]
    job = start_sharded(setting, faults, policy={**BUDDIES, **more}, **ONE_NODE)
    assert job.wait(PATIENCE_S) == 0, job.said()
    first, second = finish(job)["incidents"]
    assert (first["restore"], set(first["replaced"])) == (source, {1, 2}), first
    assert step <= first["resumed_step"] <= 6, first
    assert (second["restore"], second["resumed_step"], second["replaced"]) == ("replica", 10, [3]), second
    assert_same_numbers(job.record(), calm, ranks=WORLD)


@pytest.mark.soak
def test_a_flipped_parameter_of_a_model_on_one_dimension_is_found_and_comes_from_the_buddy(
    start_sharded: StartSharded,
) -> None:
    """Without a second holder nothing can be voted on."""
    setting = Setting(mesh=(WORLD,))
    calm = undisturbed(start_sharded, setting)
    policy = {**BUDDIES, "integrity": {"every_steps": 1}}
    flips = [ArmedFault(2, FaultAction.FLIP_PARAMETER, InjectionPoint.FORWARD, 6)]
    job = start_sharded(setting, flips, policy=policy, **ONE_NODE)
    assert job.wait(PATIENCE_S) == 0, job.said()
    (incident,) = finish(job)["incidents"]
    assert (incident["reports"][0]["rank"], incident["steps_lost"]) == (2, 0), incident
    assert incident["pids_before"] == incident["pids_after"]
    assert_same_numbers(job.record(), calm, ranks=WORLD)


@pytest.mark.soak
def test_on_the_fake_device_no_step_is_lost(start_sharded: StartSharded) -> None:
    """The copy is in the device's memory, and comes over its links."""
    fake: dict[str, Any] = {**ONE_NODE, "device": "fake"}
    setting = Setting(mesh=(WORLD,), steps=9)
    calm = calm_record(start_sharded(setting, **fake), PATIENCE_S)
    faults = [inject(1, InjectionPoint.BACKWARD, 3), inject(2, InjectionPoint.UPDATE, 6)]
    job = start_sharded(setting, faults, policy=BUDDIES, **fake)
    assert job.wait(PATIENCE_S) == 0, job.said()
    incidents = finish(job)["incidents"]
    assert [(each["replaced"], each["resumed_step"]) for each in incidents] == [([1], 3), ([2], 7)], incidents
    assert_same_numbers(job.record(), calm, ranks=WORLD)


@pytest.mark.soak
def test_a_buddy_that_is_lost_while_it_sends_the_copy_back_is_the_last_holder(start_sharded: StartSharded) -> None:
    """A second fault in the repair of the first one: all go back to the checkpoint, with the same bits.

    The copy was there: the rank had come back from it before.
    """
    setting = Setting(mesh=(WORLD,))
    calm = undisturbed(start_sharded, setting)
    faults = [
        inject(1, InjectionPoint.FORWARD, 3),
        inject(1, InjectionPoint.FORWARD, 6, life=2),
        inject(2, InjectionPoint.REPAIR, 6),
    ]
    job = start_sharded(setting, faults, policy={**BUDDIES, "checkpoint": {"every_steps": 4}}, **ONE_NODE)
    assert job.wait(PATIENCE_S) == 0, job.said()
    before, incident = finish(job)["incidents"]
    assert (before["restore"], before["resumed_step"], before["replaced"]) == ("replica", 3, [1]), before
    assert (incident["outcome"], set(incident["replaced"])) == ("resumed", {1, 2}), incident
    assert incident["resumed_step"] == 4, incident
    assert_same_numbers(job.record(), calm, ranks=WORLD)
