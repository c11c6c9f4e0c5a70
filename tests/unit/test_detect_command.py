"""`midstep detect`: what the command hands to the detector that it starts."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli import detect
from midstep.cli.detect import Watched
from midstep.controller.endpoints.discovery_files import write_endpoint
from midstep.launch.job import PreparedJob, Start, create_job

POLICY = "faults: {node_names: {worker-7: node1}, node_serials: {'2102312NSF10': node0}}\n"


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """A job whose policy says by which names the cluster's documents mean its nodes, and which seems to run."""
    policy, script = tmp_path / "policy.yaml", tmp_path / "train.py"
    policy.write_text(POLICY)
    script.write_text("")
    prepared = create_job(Start(command=(str(script),), policy_file=policy, job_directory=tmp_path / "job"))
    write_endpoint(prepared.run_directory, "tcp://127.0.0.1:1")
    yield prepared
    prepared.held.remove()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """What detectors were told to watch."""
    found: list[Watched] = []

    async def report_faults(way: object, name: str, watched: Watched) -> int:
        found.append(watched)
        return 0

    monkeypatch.setattr(detect, "report_faults", report_faults)
    return found


def test_a_detector_knows_the_nodes_by_the_names_that_the_policy_gives(
    job: PreparedJob, watched: list[Watched]
) -> None:
    """What `midstep status` advises to write into the policy is what helps."""
    done = CliRunner().invoke(detect.command, [str(job.job_directory), "--source", str(job.job_directory)])
    assert done.exit_code == 0, done.output
    assert watched[0].serials == {"worker-7": "node1", "2102312NSF10": "node0"}


def test_a_name_on_the_command_line_goes_before_that_of_the_policy(job: PreparedJob, watched: list[Watched]) -> None:
    options = ["--source", str(job.job_directory), "--node-name", "worker-7=node0", "--serial", "99=node1"]
    assert CliRunner().invoke(detect.command, [str(job.job_directory), *options]).exit_code == 0
    assert watched[0].serials == {"worker-7": "node0", "2102312NSF10": "node0", "99": "node1"}


def test_the_npus_of_this_machine_are_watched_on_their_own(job: PreparedJob, watched: list[Watched]) -> None:
    options = [str(job.job_directory), "--npu-smi", "--node-name", "host=node0"]
    assert CliRunner().invoke(detect.command, options).exit_code == 0
    assert (watched[0].npu_smi, watched[0].kernel_log, watched[0].serials["host"]) == (True, "", "node0")
    refused = CliRunner().invoke(detect.command, [*options, "--lines"])
    assert "start one for each" in refused.output
    assert refused.exit_code == 2
