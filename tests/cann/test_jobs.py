"""Jobs on torch-npu's own device and process groups: each fault takes the rung that the policy says, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.built import built, wait_until_built
from tests.chaos.comparing import assert_nobody_harmed, assert_same_numbers, finish
from tests.chaos.jobs import Job, Record, inject

from midstep.protocol.faults import ArmedFault, FaultAction, InjectionPoint

from .environment import require_cann

RANKS = 3
STEPS = 40
JOB_S = 500.0
SCRIPT = Path(__file__).with_name("training.py")
# HCCL holds on to a link-up for as long as HCCL_CONNECT_TIMEOUT says: at least 120 s, on NPUs as here.
POLICY: dict[str, Any] = {
    "ladder": [
        {"rung": "retry_step", "attempts": 8, "budget": {"per_job": 1000}},
        {"rung": "recover_in_place", "attempts": 8, "budget": {"per_job": 1000}},
        {"rung": "stop"},
    ],
    "communicator": {"link_up_s": 60, "link_up_attempts": 3},
    "deadlines": {"quiesce_s": 60, "rejoin_s": 240, "start_s": 240, "stop_grace_s": 5.0},
    "checkpoint": {"every_steps": 10},
    "stall": {"grace_s": 10.0, "suspended_s": 10.0},
    "heartbeat": {"missed": 20},
    "incident": {"max_attempts": 20},
    "node": {"failures": None},
}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def job(root: Path, faults: list[ArmedFault], steps: int = STEPS, **options: Any) -> Job:
    shape: dict[str, Any] = {"nodes": 1, "ranks_per_node": RANKS, "device": "npu", "policy": POLICY, **options}
    return Job(root, faults=faults, script=SCRIPT, steps=steps, step_s=0.05, **shape)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a run to which nothing happens."""
    require_cann()
    calm = job(tmp_path_factory.mktemp("undisturbed"), [])
    try:
        assert not ended(calm)["incidents"], calm.said()
        return calm.record()
    finally:
        calm.close()


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, dict[str, Any]]]:
    """One job to which everything happens, one after the other: to start one takes longer than to recover."""
    require_cann()
    faults = [fault for _, faults, _, _ in CASES for fault in faults]
    made = job(tmp_path_factory.mktemp("hurt"), faults)
    try:
        yield made, ended(made)
    finally:
        made.close()


def ended(made: Job, limit_s: float = JOB_S) -> dict[str, Any]:
    """Wait for a job that has to end well: torch-npu takes long to import."""
    assert made.wait(limit_s) == 0, made.said()
    return finish(made)


def harm(rank: int, action: FaultAction, point: InjectionPoint, step: int, life: int = 1) -> ArmedFault:
    return inject(rank, point, step, life=life, action=action)


RETRY, IN_PLACE = ["retry_step"], ["recover_in_place"]
# What happens, the rungs taken, who is replaced.
CASES: list[tuple[str, list[ArmedFault], list[str], set[int]]] = [
    ("an error in a parameter", [harm(0, FaultAction.MEMORY_PERSISTENT, InjectionPoint.FORWARD, 3)], RETRY, set()),
    ("an error in unused memory", [harm(2, FaultAction.MEMORY_TEMPORARY, InjectionPoint.BACKWARD, 6)], RETRY, set()),
    ("a link that fails", [harm(1, FaultAction.LINK_DOWN, InjectionPoint.COLLECTIVE, 9)], RETRY, set()),
    ("kill -9", [harm(1, FaultAction.KILL, InjectionPoint.BACKWARD, 13)], IN_PLACE, {1}),
    ("kill -9 of rank 0", [harm(0, FaultAction.KILL, InjectionPoint.FORWARD, 17)], IN_PLACE, {0}),
    ("a queue that ends", [harm(2, FaultAction.TASK_QUEUE_DEAD, InjectionPoint.FORWARD, 21)], IN_PLACE, {2}),
    ("SIGSTOP", [harm(1, FaultAction.STOP, InjectionPoint.FORWARD, 26, life=2)], IN_PLACE, {1}),
    (
        "a second kill in the link-up",
        [
            harm(0, FaultAction.KILL, InjectionPoint.FORWARD, 32, life=2),
            harm(2, FaultAction.KILL, InjectionPoint.REBUILD, 32, life=2),
        ],
        IN_PLACE,
        {0, 2},
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, *_ in CASES])
def test_a_fault_is_mended_by_its_rung(hurt: tuple[Job, dict[str, Any]], number: int) -> None:
    made, report = hurt
    _, _, rungs, replaced = CASES[number]
    assert len(report["incidents"]) == len(CASES), made.said()
    incident = report["incidents"][number]
    assert list(dict.fromkeys(decision["rung"] for decision in incident["decisions"])) == rungs, incident["reasons"]
    assert_nobody_harmed(incident, replaced, ranks=RANKS)


def test_every_step_has_the_bits_of_the_undisturbed_run(hurt: tuple[Job, dict[str, Any]], undisturbed: Record) -> None:
    assert_same_numbers(hurt[0].record(), undisturbed, ranks=RANKS)


def test_a_process_that_was_built_ahead_takes_the_place_of_a_killed_one(tmp_path: Path, undisturbed: Record) -> None:
    """It has imported torch-npu, and run the script up to the group: it opens its device when it is needed."""
    faults = [harm(1, FaultAction.KILL, InjectionPoint.BACKWARD, 13)]
    made = job(tmp_path, faults, gates=(12,), policy={**POLICY, "standby": {"depth": "built"}})
    try:
        made.held_at(12)
        wait_until_built(made, RANKS)
        ahead = built(made)
        made.open_gate(12)
        (incident,) = ended(made)["incidents"]
        assert_nobody_harmed(incident, {1}, ranks=RANKS)
        assert ahead[incident["pids_after"]["1"]] == 1
        assert_same_numbers(made.record(), undisturbed, ranks=RANKS)
    finally:
        made.close()
