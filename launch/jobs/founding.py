"""The directory of a new job, and the journal in it."""

from pathlib import Path

from ...controller.journal.file_system import require_local
from ...controller.journal.journal import Journal
from ...controller.journal.paths import journal_path
from ...policies.files import render
from ...policies.schema import Policy
from ...protocol.errors import ConfigurationError
from ...protocol.private_files import make_private_directory, replace_file
from ...protocol.types import JobSpec
from .directories import is_job

POLICY_NAME = "policy.yaml"  # the policy as it was read, in the directory of its job


def make_job_directory(directory: Path, policy: Policy) -> None:
    """Make the directory of a new job, with its policy as it was read. Raises ConfigurationError."""
    if is_job(directory):
        raise ConfigurationError(f"{directory} holds a job already. Choose another --job or --job-dir, or remove it.")
    require_local(directory)
    try:
        make_private_directory(directory / "logs")
        replace_file(directory / POLICY_NAME, render(policy).encode())
    except OSError as error:
        raise unwritable(directory, error) from error


def found_in_directory(directory: Path, spec: JobSpec, policy: Policy, *, platform: str = "") -> None:
    """Make a job that waits for its controller, one at a time; `platform`: what makes its nodes, see Founding.

    Raises ConfigurationError, JournalError.
    """
    make_job_directory(directory, policy)
    create_journal(directory, spec, policy, platform=platform)


def create_journal(directory: Path, spec: JobSpec, policy: Policy, *, platform: str = "") -> None:
    """Make the journal of a new job, with which it begins to exist. Raises ConfigurationError, JournalError."""
    try:
        Journal.create(journal_path(directory), spec, policy, platform=platform)
    except OSError as error:
        raise unwritable(directory, error) from error


def unwritable(directory: Path, error: OSError) -> ConfigurationError:
    """Return the error of a job directory that cannot be written."""
    return ConfigurationError(f"{directory} cannot be written: {error}. Choose another --job-dir.")
