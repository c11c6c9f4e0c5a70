"""Several ranks die at once, up to all of them, and then a node for which there is no spare."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import RANKS, ROOMY, Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.both_devices(second_in_soak=True), pytest.mark.timeout(240)]


def at_once(step: int, lives: dict[int, int]) -> Iterable[ArmedFault]:
    """Kill these lives of ranks in one step; those that have been stopped already, when they stop."""
    for rank, life in lives.items():
        yield inject(rank, InjectionPoint.FORWARD, step, life=life)
        yield inject(rank, InjectionPoint.STOP, step, life=life)


SOME = {
    "two on one node": (8, {0: 1, 1: 1}),
    "two on two nodes": (16, {1: 2, 2: 1}),
    "all but one": (24, {0: 2, 1: 3, 3: 1}),
}
ALL_STEP, ALL = 35, {0: 3, 1: 4, 2: 2, 3: 2}
NODE_STEP, TOLD_STEP = 47, 55
TOLD = "relaunch.json"
HOOK = Path(__file__).with_name("relaunch_hook.py")
FAULTS = [
    *(fault for step, lives in SOME.values() for fault in at_once(step, lives)),
    *at_once(ALL_STEP, ALL),
]


@pytest.fixture(scope="module")
def job(start_shared_job: StartJob) -> Job:
    policy = {**ROOMY, "on_node_relaunch": f"{sys.executable} {HOOK}"}
    job = start_shared_job(faults=FAULTS, gates=[NODE_STEP, TOLD_STEP], fixed_nodes=False, policy=policy)
    job.kill_node(job.held_at(NODE_STEP).ranks[3].node)
    job.open_gate(NODE_STEP)
    job.held_at(TOLD_STEP)
    job.until(lambda status: (job.records / TOLD).exists(), "the hook to be called")
    job.open_gate(TOLD_STEP)
    return job


@pytest.fixture(scope="module")
def incidents(job: Job) -> dict[str, dict[str, Any]]:
    incidents = finish(job)["incidents"]
    told = [(incident["cause"], incident["resumed_step"]) for incident in incidents]
    assert len(incidents) == len(SOME) + 2, f"{told}\n{job.said()}"
    return dict(zip([*SOME, "all", "node"], incidents, strict=True))


@pytest.mark.parametrize("who", SOME)
def test_ranks_killed_at_once_are_replaced_at_once(incidents: dict[str, dict[str, Any]], who: str) -> None:
    """As long as one rank is left, nobody else is harmed and no step is lost."""
    step, lives = SOME[who]
    assert_nobody_harmed(incidents[who], set(lives))
    assert incidents[who]["resumed_step"] == step


def test_without_any_copy_left_the_checkpoint_is_used(incidents: dict[str, dict[str, Any]]) -> None:
    """All ranks killed: all restart from the last complete checkpoint, and the report says so and why."""
    incident = incidents["all"]
    assert incident["outcome"] == "resumed"
    assert incident["rung"] == "reschedule_pod"
    assert incident["restore"] == "checkpoint"
    assert incident["resumed_step"] == 30
    assert incident["steps_lost"] == ALL_STEP - 30
    assert set(incident["replaced"]) == set(range(RANKS))
    reasons = " ".join(incident["reasons"])
    assert "checkpoint" in reasons
    assert "no healthy rank is left" in reasons


def test_a_lost_node_without_a_spare_is_replaced_by_a_new_one(incidents: dict[str, dict[str, Any]]) -> None:
    """No spare node: the platform brings one, the healthy ranks are parked until then, and no step is lost."""
    incident = incidents["node"]
    assert_nobody_harmed(incident, {2, 3})
    assert incident["rung"] == "recover"
    assert incident["resumed_step"] == NODE_STEP
    assert "to 1 node that the platform brings" in incident["decisions"][-1]["reason"]
    skipped = {skipped["rung"]: skipped["reason"] for skipped in incident["decisions"][-1]["skipped"]}
    assert "lost" in skipped["recover_in_place"]


def test_the_users_program_is_called_with_the_node_that_was_replaced(
    job: Job, incidents: dict[str, dict[str, Any]]
) -> None:
    """`on_node_relaunch` of the policy; no recovery has waited for it."""
    assert incidents
    told = json.loads((job.records / TOLD).read_text())
    assert (told["job"], told["ranks"], told["state"]) == (job.name, [2, 3], "lost")
    assert told["node"] not in told["replaced_by"]


def test_losing_much_changes_no_bit(job: Job, incidents: dict[str, dict[str, Any]], undisturbed: Record) -> None:
    """Training is deterministic, so what was done again from a checkpoint is equal bit for bit, too."""
    assert incidents
    assert_same_numbers(job.record(), undisturbed)
