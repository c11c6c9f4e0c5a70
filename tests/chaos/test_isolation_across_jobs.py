"""Three jobs of one home, with real processes: what came too often in the first one, the second one does not use."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.protocol.incidents import JobStatus

from .comparing import assert_nobody_harmed, finish
from .conftest import StartJob
from .jobs import ROOMY, Job

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

GATE, STEPS = 4, 8
CODE = "80818C00"
POLICY: dict[str, Any] = {
    **ROOMY,
    "faults": {"codes": {CODE: "NotHandleFault"}, "too_often": [{"codes": [CODE], "times": 3, "window_s": 600}]},
}
OCCURS = f'{{"code": "{CODE}", "node": "node1", "device": 1}}\n'
IS_OVER = OCCURS.replace("}", ', "assertion": "recover"}')


def used(status: JobStatus) -> dict[str, str]:
    return {node.node: node.state for node in status.nodes}


def isolated(*options: str) -> str:
    """What the command says."""
    done = CliRunner().invoke(main, ["isolated", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def report(job: Job, lines: str) -> None:
    words = [sys.executable, "-m", "midstep.cli.main", "detect", str(job.directory), "--lines", "--name", "bmc"]
    subprocess.run(words, input=lines, text=True, timeout=60, check=True)


def test_a_device_with_a_fault_too_often_is_not_used_by_the_next_job_until_it_is_released(
    start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is unfit from the beginning of the second job, which takes it for a spare when it is released."""
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path / "home"))
    first = start_job(spares=1, policy=POLICY, gates=(GATE,), steps=STEPS)
    assert used(first.held_at(GATE)) == {"node0": "active", "node1": "active", "node2": "spare"}
    report(first, (OCCURS + IS_OVER) * 2 + OCCURS)
    first.until(lambda status: any(incident.decisions for incident in status.incidents), "a decision")
    first.open_gate(GATE)
    (incident,) = finish(first)["incidents"]
    assert incident["rung"] == "recover"
    assert_nobody_harmed(incident, {2, 3})
    assert "node1, device 1: until 20" in (listed := isolated()), listed
    assert f"{CODE} in job {first.name}" in listed

    second = start_job(spares=1, policy=POLICY, gates=(GATE,), steps=STEPS)
    status = second.held_at(GATE)
    assert used(status) == {"node0": "active", "node1": "unfit", "node2": "active"}
    (fault,) = status.faults
    assert (fault.report.node, fault.report.device, fault.report.level) == ("node1", 1, "ManuallySeparateNPU")
    assert f"isolated by job {first.name}" in fault.report.detail
    assert CODE in fault.report.detail
    assert "released" in isolated("--release", "node1", "--device", "1")
    second.until(lambda status: used(status)["node1"] == "spare", "the release")
    second.open_gate(GATE)
    assert finish(second)["incidents"] == []

    third = start_job(spares=1, policy=POLICY, gates=(GATE,), steps=STEPS)
    assert used(third.held_at(GATE)) == {"node0": "active", "node1": "active", "node2": "spare"}
    third.open_gate(GATE)
    assert finish(third)["incidents"] == []
