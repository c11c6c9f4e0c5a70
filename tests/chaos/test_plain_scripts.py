"""A script that never heard of midstep runs under `midstep run` as under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from midstep.agent.fork_server import PRELOAD_STORE
from midstep.protocol import environment as names

from .comparing import finish
from .conftest import StartJob
from .jobs import PATIENCE_S, Job

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

PLAIN = Path(__file__).with_name("plain.py")
RANKS = range(2)
DIFFERENT = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}  # they name a place or a run
# How torchrun's own wrapper finds its files and signals, and what Python sets when it meets a terminal.
NOT_FOR_SCRIPTS = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "COLUMNS", "LINES"}


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the nodes import no more than these scripts do, which train nothing."""
    monkeypatch.setenv(names.PRELOAD, PRELOAD_STORE)


def start_plain(start_job: StartJob, tmp_path: Path, *options: str, stubborn: bool = False) -> tuple[Job, Path]:
    """Start the script on one node with two ranks."""
    records = tmp_path / "plain"
    records.mkdir()
    arguments = [str(records), *(["stubborn"] if stubborn else [])]
    return start_job(nodes=1, script=PLAIN, arguments=arguments, options=options), records


def test_it_is_restarted_as_a_whole_with_the_environment_of_torchrun(start_job: StartJob, tmp_path: Path) -> None:
    """One failure and one restart: exit code 0, and each rank of each try finds what torchrun gives it."""
    job, records = start_plain(start_job, tmp_path, "--max-restarts", "1")
    report = finish(job)
    assert [incident["rung"] for incident in report["incidents"]] == ["reschedule_pod"]
    assert "no rank reached a resilient train function" in " ".join(report["incidents"][0]["reasons"])
    assert [float((records / f"total.{rank}").read_text()) for rank in RANKS] == [1.0, 1.0]
    theirs = under_torchrun(tmp_path)
    for rank in RANKS:
        for attempt in (0, 1):
            name = f"environment.{rank}.{attempt}.json"
            given = json.loads((records / name).read_text())
            expected = {
                key: value
                for key, value in json.loads((theirs / name).read_text()).items()
                if os.environ.get(key) != value and key not in NOT_FOR_SCRIPTS
            }
            assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT"} <= set(expected)
            assert set(expected) <= set(given), f"missing: {set(expected) - set(given)}"
            differing = {
                key: (value, given[key])
                for key, value in expected.items()
                if key not in DIFFERENT and given[key] != value
            }
            assert not differing, f"rank {rank}, try {attempt}: {differing}"


def test_without_restarts_its_failure_is_the_job_s(start_job: StartJob, tmp_path: Path) -> None:
    """--max-restarts 0, torchrun's default: exit code 1 and the reason."""
    job, records = start_plain(start_job, tmp_path)
    assert job.wait() == 1, job.said()
    job.assert_nothing_left()
    assert "budget max-restarts is spent: 0 of 0" in job.report()["reason"]
    assert not list(records.glob("total.*"))


def test_a_script_that_always_fails_is_given_up(start_job: StartJob, tmp_path: Path) -> None:
    """It is tried --max-restarts times more, not once more than that."""
    job, records = start_plain(start_job, tmp_path, "--max-restarts", "1", stubborn=True)
    assert job.wait() == 1, job.said()
    job.assert_nothing_left()
    assert "budget max-restarts is spent: 1 of 1" in job.report()["reason"]
    assert len(list(records.glob("environment.1.*"))) == 2


def under_torchrun(tmp_path: Path) -> Path:
    """Run the script under the real torchrun and return where it has written its environments."""
    records = tmp_path / "torchrun"
    records.mkdir()
    shape = ["--standalone", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shape, str(PLAIN), str(records), "lonely"],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return records
