"""`midstep policy from-acjob` at the command line."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from midstep.cli.policy import command
from midstep.policies.files import load_policy, parse_policy

EXAMPLE = Path(__file__).parents[3] / "examples" / "acjob.yaml"


def from_acjob(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    """Run the command."""
    return CliRunner().invoke(command, ["from-acjob", *map(str, arguments)], input=stdin)


def test_the_policy_goes_to_stdout_and_the_notes_to_stderr() -> None:
    """So that `> policy.yaml` gives a policy, and the notes are seen."""
    result = from_acjob(EXAMPLE)

    assert result.exit_code == 0
    assert parse_policy(result.stdout, "made")
    assert "different: rank 0 is a rank like any other" in result.stderr
    assert "no counterpart: line 60, TTP_PORT: 8000" in result.stderr


def test_the_output_file_can_be_loaded_and_is_not_overwritten_without_force(tmp_path: Path) -> None:
    """A policy that was edited by hand is not lost."""
    path = tmp_path / "policy.yaml"

    assert from_acjob(EXAMPLE, "--output", path).exit_code == 0
    made = load_policy(path)
    path.write_text("device: cpu\n")
    second = from_acjob(EXAMPLE, "--output", path)
    assert second.exit_code == 1
    assert "is there already, and nothing was written; --force replaces it" in second.stderr
    assert path.read_text() == "device: cpu\n"
    assert from_acjob(EXAMPLE, "--output", path, "--force").exit_code == 0
    assert load_policy(path) == made


def test_a_document_is_read_from_stdin() -> None:
    """As `kubectl get acjob -o yaml | midstep policy from-acjob -` gives it."""
    result = from_acjob("-", stdin=EXAMPLE.read_text())

    assert result.exit_code == 0
    assert "from stdin, line 12" in result.stdout


@pytest.mark.parametrize("stdin", [b"\xff", b"kind: Pod", b"#" * (2 << 20)])
def test_a_wrong_document_ends_with_1_and_prints_no_policy(stdin: bytes) -> None:
    """Half a policy in a pipe would be worse than none."""
    result = from_acjob("-", stdin=stdin)

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("stdin: ")


def test_a_place_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    """With the system's reason."""
    assert "none.yaml: cannot be read: No such file" in from_acjob(tmp_path / "none.yaml").stderr
    assert "cannot be written" in from_acjob(EXAMPLE, "--output", tmp_path / "none" / "policy.yaml").stderr


def test_one_of_several_jobs_is_chosen_by_name() -> None:
    """A list from kubectl has many."""
    path = Path(__file__).parent / "documents" / "paused_list.yaml"

    assert "choose one with --job" in from_acjob(path).stderr
    assert from_acjob(path, "--job", "paused").exit_code == 0
