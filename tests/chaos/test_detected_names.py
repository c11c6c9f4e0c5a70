"""A detector beside a job whose policy says by which names the cluster's documents mean its nodes."""

import subprocess
import sys
from pathlib import Path

import pytest

from midstep.policies.fault_codes import LevelName

from .comparing import assert_nobody_harmed, finish
from .conftest import StartJob
from .jobs import ROOMY
from .test_reported_faults import CASES, decided, write

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(240)]

GATE = 4


def test_a_fault_of_a_node_that_the_cluster_calls_otherwise_moves_the_ranks_of_that_node(
    start_job: StartJob, tmp_path: Path
) -> None:
    """`midstep detect JOB` finds the names in the job's own policy."""
    documents = tmp_path / "documents"
    documents.mkdir()
    policy = {**ROOMY, "faults": {"node_names": {"worker-7": "node1"}}}
    job = start_job(spares=1, policy=policy, gates=(GATE,))
    job.held_at(GATE)
    words = [sys.executable, "-m", "midstep.cli.main", "detect", str(job.directory), "--source", str(documents)]
    with subprocess.Popen(words) as detector:
        try:
            write(documents, CASES[LevelName.RESTART_NPU], "worker-7")
            job.until(lambda status: decided(0, status), "a decision")
            job.open_gate(GATE)
            report = finish(job)
        finally:
            detector.kill()

    (incident,) = report["incidents"]
    assert incident["rung"] == "recover"
    assert incident["reports"][0]["node"] == "node1"
    assert_nobody_harmed(incident, {2, 3})
