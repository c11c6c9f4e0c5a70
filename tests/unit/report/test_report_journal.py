"""The command on real journals: one just founded, and files that are none."""

import json
from pathlib import Path

from click.testing import CliRunner

from midstep.cli.report import command
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal
from midstep.policies.schema import default_policy
from midstep.protocol.types import JobSettings, JobSpec


def job(directory: Path) -> JobSpec:
    return JobSpec(
        job="young",
        command=("train.py",),
        is_module=False,
        no_python=False,
        environment={},
        working_directory=str(directory),
        job_directory=str(directory),
        world_size=2,
        ranks_per_node=1,
        nodes=2,
        spare_nodes=0,
        max_restarts=0,
        settings=JobSettings(),
    )


def test_a_job_that_was_only_founded_has_a_report(tmp_path: Path) -> None:
    found_journal(journal_path(tmp_path), job(tmp_path), default_policy())
    text = CliRunner().invoke(command, [str(tmp_path)])
    assert text.exit_code == 0, text.output
    assert text.output.startswith("Job young: ")
    assert "No incidents." in text.output
    data = json.loads(CliRunner().invoke(command, [str(tmp_path), "--json"]).stdout)
    assert data["incidents"] == []


def test_a_file_that_is_no_journal_is_an_error_in_words(tmp_path: Path) -> None:
    journal_path(tmp_path).write_bytes(b"not a database at all" * 100)
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "journal.sqlite" in result.output
    assert not isinstance(result.exception, ValueError | OSError)
