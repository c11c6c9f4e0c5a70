"""`job.json` in a job directory: where the running part of the job is, for the commands that talk to it.

Written when a controller is started. The run directory holds sockets and keys and goes away with the job; the job
directory stays.
"""

from pathlib import Path

import msgspec

from ...protocol.errors import ConfigurationError
from ...protocol.private_files import replace_file

JOB_FILE_NAME = "job.json"


class JobFile(msgspec.Struct, frozen=True):
    """What `job.json` says. Unknown keys are left to later versions.

    `store`: the address of what keeps the journal, under the name `job`; empty: it lies in the job directory.
    """

    run_dir: str
    store: str = ""
    job: str = ""


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
    known = read_job_file(job_directory)
    return None if known is None else Path(known.run_dir)


def read_job_file(job_directory: Path) -> JobFile | None:
    """Return `job.json`; None if the job was never started. Raises ConfigurationError if it cannot be read."""
    path = job_directory / JOB_FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path}: cannot be read: {error}. It is written when a job is started and names the job's run directory."
        ) from error
