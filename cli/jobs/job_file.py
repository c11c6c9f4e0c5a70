"""`job.json` in a job directory: where the running part of the job is, for the commands that talk to it.

Written once by `midstep run`. The run directory holds sockets and keys and goes away with the job; the job directory
stays.
"""

from pathlib import Path

import msgspec

from ...protocol.errors import ConfigurationError
from ...protocol.private_files import replace_file

JOB_FILE_NAME = "job.json"


class JobFile(msgspec.Struct, frozen=True):
    """What `job.json` says. Unknown keys are left to later versions."""

    run_dir: str


def write_job_file(job_directory: Path, job_file: JobFile) -> None:
    """Write `job.json`. Raises ConfigurationError."""
    path = job_directory / JOB_FILE_NAME
    try:
        replace_file(path, msgspec.json.encode(job_file) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}. Choose another --job-dir.") from error


def run_directory_of(job_directory: Path) -> Path | None:
    """Return the run directory of a job; None if the job was never started.

    Raises ConfigurationError if the file is not what it should be.
    """
    path = job_directory / JOB_FILE_NAME
    try:
        return Path(msgspec.json.decode(path.read_bytes(), type=JobFile).run_dir)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path}: cannot be read: {error}. It is written by `midstep run` and names the job's run directory."
        ) from error
