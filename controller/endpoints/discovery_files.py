"""Discovery files: where the controller listens (`controller.endpoint`), and how the job ended (`result.json`).

Both are replaced as a whole, so that a reader never sees half of one.
"""

import contextlib
from pathlib import Path

import msgspec

from ...protocol.discovery import ENDPOINT_NAME, read_endpoint
from ...protocol.errors import ConfigurationError, MidstepError
from ...protocol.private_files import replace_file

RESULT_NAME = "result.json"


class JobResult(msgspec.Struct, frozen=True):
    """How a job ended: `result.json` in its job directory. `at_s` is wall-clock seconds."""

    job: str
    exit_code: int
    reason: str
    term: int
    at_s: float


def write_endpoint(run_directory: Path, endpoint: str) -> None:
    """Say where the controller listens, as one line, e.g. `tcp://127.0.0.1:41237`.

    A file that says so already is left alone: a controller that takes over at the same place needs no space for it.
    """
    with contextlib.suppress(ConfigurationError):  # what cannot be read is replaced
        if read_endpoint(run_directory) == endpoint:
            return
    _replace(run_directory / ENDPOINT_NAME, f"{endpoint}\n".encode())


def write_result(job_directory: Path, result: JobResult) -> None:
    """Say how the job ended."""
    _replace(job_directory / RESULT_NAME, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def read_result(job_directory: Path) -> JobResult | None:
    """Return how the job ended; None while it has not. Raises MidstepError when the file cannot be read."""
    path = job_directory / RESULT_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobResult)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise MidstepError(
            f"{path}: not a result of midstep ({error}). Remove the file and look at the journal."
        ) from error


def _replace(path: Path, data: bytes) -> None:
    try:
        replace_file(path, data)
    except OSError as error:
        raise MidstepError(
            f"{path}: cannot be written: {error.strerror}. Check space and permissions of that directory."
        ) from error
