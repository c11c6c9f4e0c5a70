"""The ladder ends: the job stops, says why, and leaves a checkpoint that can be used."""

import signal
from pathlib import Path
from typing import Any

import pytest

from midstep import TrainState
from midstep.processor.checkpoints import archive
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from .comparing import assert_same_steps
from .conftest import StartJob
from .jobs import ONE_NODE, RANKS, ROOMY, Record, inject
from .training import build_model, build_optimizer, build_scheduler, digest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

HELD = 8
INTERRUPTED = 130
ONE_EACH = {**ROOMY, "ladder": [{"rung": "recover_in_place", "budget": {"per_rank": 1}}, {"rung": "stop"}]}
NO_NEW_NODES = {**ROOMY, "ladder": [{"rung": "recover_in_place"}, {"rung": "recover"}, {"rung": "stop"}]}

CASES: dict[str, tuple[dict[str, Any], list[ArmedFault], int, list[str]]] = {
    "budget spent": (
        ONE_EACH,
        [inject(1, InjectionPoint.FORWARD, 8), inject(1, InjectionPoint.FORWARD, 16, life=2)],
        16,
        ["budget per_rank of rank 1 is spent: 1 of 1"],
    ),
    "no spare node": (
        NO_NEW_NODES,
        [inject(3, InjectionPoint.BACKWARD, 12, action=FaultAction.KILL_NODE)],
        12,
        ["no spare node", "node node1 is lost"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_at_the_end_of_the_ladder_the_job_stops_with_its_reason_and_a_checkpoint(
    start_job: StartJob, undisturbed: Record, case: str
) -> None:
    """Exit code 1, the reason in the report, and an emergency checkpoint of the last committed step that loads."""
    policy, faults, step, reasons = CASES[case]
    nodes = {} if any(fault.action is FaultAction.KILL_NODE for fault in faults) else ONE_NODE
    job = start_job(policy=policy, faults=faults, **nodes)
    assert job.wait() == 1, job.said()
    job.assert_nothing_left()
    report = job.report()
    assert report["exit_code"] == 1
    incident = report["incidents"][-1]
    assert incident["outcome"] == "stopped"
    assert incident["rung"] == "stop"
    for reason in reasons:
        assert reason in report["reason"]
        assert reason in " ".join(incident["reasons"])
    assert f"an emergency checkpoint of step {step} is at" in report["reason"], report["reason"]
    assert_same_steps(job.record(), undisturbed)
    assert_loads(job.directory / "checkpoints", step, undisturbed)


def test_sigterm_to_all_processes_of_a_step_of_slurm_stops_the_job_with_a_checkpoint(
    start_job: StartJob, undisturbed: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `scancel` sends it. Only the launcher acts on it: ranks, agent and controller are there until all is saved."""
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    job = start_job(gates=(HELD,), **ONE_NODE)
    job.held_at(HELD)
    for process in job.processes():
        process.send_signal(signal.SIGTERM)
    job.open_gate(HELD)
    assert job.wait() == INTERRUPTED, job.said()
    job.assert_nothing_left()
    report = job.report()
    assert (report["exit_code"], report["incidents"]) == (INTERRUPTED, []), job.said()
    (steps,) = {len(steps) for steps in job.record().steps.values()}
    assert f"an emergency checkpoint of step {steps} is at" in report["reason"], report["reason"]
    assert_same_steps(job.record(), undisturbed)
    assert_loads(job.directory / "checkpoints", steps, undisturbed)


def assert_loads(directory: Path, step: int, undisturbed: Record) -> None:
    """The checkpoint is complete, and its parameters are those of the undisturbed run after `step` updates."""
    assert archive.complete_steps(directory)[-1] == step
    model = build_model()
    optimizer = build_optimizer(model)
    state = TrainState(model=model, optimizer=optimizer, scheduler=build_scheduler(optimizer))
    for hold in state.shards():
        assert archive.load_shard(directory, step, hold.shard_id, state) > 0
    assert {(digest(dict(model.named_parameters())))} == {
        parameters for _, parameters in undisturbed.steps[0][step - 1]
    }
    assert all(archive.load_local(directory, step, rank) for rank in range(RANKS))
