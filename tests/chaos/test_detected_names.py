"""A detector beside a job: it finds the names of nodes in the policy, or hears the driver of the machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstep.policies.fault_codes import LevelName

from .comparing import assert_nobody_harmed, finish
from .conftest import StartJob
from .jobs import ROOMY
from .test_reported_faults import CASES, decided, write

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(240)]

GATE = 4


def moved_by(
    start_job: StartJob,
    policy: dict[str, Any],
    options: tuple[str, ...],
    strike: Callable[[], object],
    stdin: int = subprocess.DEVNULL,
) -> dict[str, Any]:
    """Have a detector see a fault of the second node, whose ranks have to move; return the report that led to it."""
    job = start_job(spares=1, policy=policy, gates=(GATE,))
    job.held_at(GATE)
    words = [sys.executable, "-m", "midstep.cli.main", "detect", str(job.directory), *options]
    with subprocess.Popen(words, stdin=stdin) as detector:
        try:
            strike()
            job.until(lambda status: decided(0, status), "a decision")
            job.open_gate(GATE)
            report = finish(job)
        finally:
            detector.kill()
    (incident,) = report["incidents"]
    assert incident["rung"] == "recover"
    assert_nobody_harmed(incident, {2, 3})
    said: dict[str, Any]
    (said,) = incident["reports"]
    return said


def test_a_fault_of_a_node_that_the_cluster_calls_otherwise_moves_the_ranks_of_that_node(
    start_job: StartJob, tmp_path: Path
) -> None:
    """`midstep detect JOB` finds the names in the job's own policy."""
    documents = tmp_path / "documents"
    documents.mkdir()
    policy = {**ROOMY, "faults": {"node_names": {"worker-7": "node1"}}}
    with_documents = ("--source", str(documents))
    said = moved_by(
        start_job, policy, with_documents, lambda: write(documents, CASES[LevelName.RESTART_NPU], "worker-7")
    )
    assert said["node"] == "node1"


CHIPS = """\
\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              Ascend 910B2
\t1                              0                              1                              Ascend 910B2
"""


def test_a_device_that_npu_smi_shows_at_fault_moves_the_ranks_of_its_node(
    start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has two of them; the second one drops off its bus while the job trains."""
    (tmp_path / "chips").write_text(CHIPS)
    (tmp_path / "well").write_text("\tHealth Status : OK\n\tError Code : NA\n\tError Information : NA\n")
    program, fault = tmp_path / "npu-smi", tmp_path / "fault"
    program.write_text(
        "#!/bin/sh\n"
        f'cd {tmp_path}; if [ "$2" = -m ]; then cat chips; exit; fi\n'
        'if [ "$5" = 1 ] && [ -e fault ]; then cat fault; else cat well; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def strike() -> None:
        (tmp_path / "new").write_text("\tHealth Status : Critical\n\tError Code : 40F84E00\n")
        (tmp_path / "new").rename(fault)

    said = moved_by(start_job, ROOMY, ("--npu-smi", "--node-name", f"{socket.gethostname()}=node1"), strike)
    assert (said["code"], said["node"], said["device"], said["rank"]) == ("40F84E00", "node1", 1, 3)


def test_a_line_of_an_npus_driver_in_the_kernels_log_moves_the_ranks_of_its_node(start_job: StartJob) -> None:
    """As MindCluster's log diagnosis has it in its tests."""
    line = (
        "localhost kernel: [ 1197.584409] [ascend] [ERROR] [drv_soft_fault] [heart_beat_judge 318] <kworker/5:1H:3936> "
        "Heartbeat lost! (device=1; old_count=1104; new_count=1104; lost_count=4; total_lost_count=4).\n"
    )
    options = ("--kernel-log", "-", "--node-name", f"{socket.gethostname()}=node1")
    lines, kernel = os.pipe()
    try:
        said = moved_by(start_job, ROOMY, options, lambda: os.write(kernel, line.encode()), stdin=lines)
    finally:
        os.close(lines)
        os.close(kernel)
    assert (said["code"], said["node"], said["device"], said["rank"]) == ("40F84E00", "node1", 1, 3)
