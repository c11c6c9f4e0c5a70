"""`midstep report` and how it finds the job that is meant."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from midstep.cli import report
from midstep.launch.directories import base_directory, find_job, jobs, latest_job
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.incidents import JobStatus
from midstep.protocol.slow_records import SlowRecord, SlowTold
from midstep.protocol.types import FaultKind

SLOW = SlowRecord("slow node-1", FaultKind.SLOW, "node-1", "rank 2 is slow", 1_770_000_000.0, {2: 1.9}, 1_770_000_060.0)


def make_job(base: Path, name: str, written_s: float) -> Path:
    directory = base / name
    directory.mkdir(parents=True)
    journal = directory / "journal.sqlite"
    journal.write_bytes(b"")
    os.utime(journal, (written_s, written_s))
    return directory


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path / "jobs"))
    make_job(tmp_path / "jobs", "gpt-a", 100.0)
    make_job(tmp_path / "jobs", "gpt-b", 300.0)
    make_job(tmp_path / "jobs", "other", 200.0)
    return tmp_path / "jobs"


@pytest.fixture
def run(base: Path, status: JobStatus, monkeypatch: pytest.MonkeyPatch) -> "Run":
    return Run(status, monkeypatch)


class Run:
    """Calls the command; every journal holds the sample job."""

    def __init__(self, status: JobStatus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Path] = []

        def load(directory: Path) -> tuple[JobStatus, SlowTold]:
            self.asked.append(directory)
            return status, SlowTold((SLOW,), 3)

        monkeypatch.setattr(report, "load_history", load)

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(report.command, list(arguments))


def test_without_a_name_the_latest_job_is_reported(run: Run, base: Path) -> None:
    result = run()
    assert result.exit_code == 0
    assert run.asked == [base / "gpt-b"]
    assert result.output.startswith("Job gpt-stdlib: FAILED")
    assert max(map(len, result.output.splitlines())) <= 100
    assert not any(line.endswith(" ") for line in result.output.splitlines())


def test_slow_ranks_are_in_the_text_and_in_the_data(run: Run) -> None:
    """Those that are not kept any more are counted."""
    text = run().output
    assert "slow      2  node-1   1.90  2026-02-02 02:40:00 UTC  1 min 0 s  reported" in text
    assert "3 earlier times that a node was named slow left out" in text
    assert "A score of 2 means twice as long as others; - means no score. This was measured:\nnode-1: " in text
    assert json.loads(run("--json").stdout)["slow"][0]["scores"] == {"2": 1.9}


def test_json_is_all_that_is_on_standard_output(run: Run, tmp_path: Path) -> None:
    result = run("other", "--json", "--incident", "2", "--trace", str(tmp_path / "trace.json"))
    data = json.loads(result.stdout)
    assert [incident["number"] for incident in data["incidents"]] == [2]
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    assert "wrote" in result.stderr


def test_picture_is_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("--incident", "1", "--picture", str(tmp_path / "r.png")).exit_code == 0
    assert (tmp_path / "r.png").stat().st_size > 0


def test_unknown_incident_is_refused_with_those_that_there_are(run: Run) -> None:
    result = run("--incident", "9")
    assert result.exit_code == 1
    assert "job gpt-stdlib has no incident 9; it has incidents 1-6" in result.output


def test_unwritable_trace_is_an_error_in_words(run: Run, tmp_path: Path) -> None:
    result = run("--trace", str(tmp_path / "absent" / "trace.json"))
    assert result.exit_code == 1
    assert "cannot write" in result.output


def test_a_job_is_found_by_path_journal_name_and_beginning(base: Path) -> None:
    assert find_job(str(base / "other")) == base / "other"
    assert find_job(str(base / "other" / "journal.sqlite")) == base / "other"
    assert find_job("gpt-a") == base / "gpt-a"
    assert find_job("oth") == base / "other"


def test_an_unknown_job_is_refused_with_those_that_there_are(base: Path) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"there is no job 'absent' \(.*--job-dir, name that directory\); jobs in .*: gpt-b, other, gpt-a",
    ):
        find_job("absent")


def test_a_beginning_that_two_jobs_share_is_refused(base: Path) -> None:
    with pytest.raises(ConfigurationError, match="2 jobs begin with 'gpt'"):
        find_job("gpt")


def test_a_directory_without_a_journal_is_no_job(base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"is not a job directory: it has no journal\.sqlite"):
        find_job(str(tmp_path / "empty"))


def test_a_name_cannot_lead_out_of_the_base_directory(base: Path) -> None:
    make_job(base.parent, "outside", 1.0)
    with pytest.raises(ConfigurationError, match="there is no job"):
        find_job("../outside")


def test_a_running_job_is_as_recent_as_its_write_ahead_log(base: Path) -> None:
    log = base / "gpt-a" / "journal.sqlite-wal"
    log.write_bytes(b"")
    os.utime(log, (400.0, 400.0))
    assert latest_job() == base / "gpt-a"


def test_no_jobs_at_all_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path / "none"))
    assert jobs() == []
    with pytest.raises(ConfigurationError, match="start one with `midstep run`"):
        latest_job()


def test_jobs_live_in_the_home_directory_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIDSTEP_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert base_directory() == tmp_path / ".midstep" / "jobs"
