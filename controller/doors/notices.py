"""The two small files by which other processes learn of the controller: where it listens, and how the job ended.

Both are replaced as a whole, so that a reader never sees half of one.
"""

from pathlib import Path

import msgspec

from ...protocol.errors import MidstepError
from ...protocol.private_files import replace_file

ENDPOINT_NAME = "controller.endpoint"
RESULT_NAME = "result.json"


class Result(msgspec.Struct, frozen=True):
    """How a job ended: `result.json` in its job directory. `at_s` is wall-clock seconds."""

    job: str
    exit_code: int
    reason: str
    term: int
    at_s: float


def write_endpoint(run_directory: Path, endpoint: str) -> None:
    """Say where the controller listens, as one line, e.g. `tcp://127.0.0.1:41237`."""
    _replace(run_directory / ENDPOINT_NAME, f"{endpoint}\n".encode())


def read_endpoint(run_directory: Path) -> str | None:
    """Return where the controller listens or last listened; None if none ever did."""
    try:
        return (run_directory / ENDPOINT_NAME).read_text().strip() or None
    except FileNotFoundError:
        return None


def write_result(job_directory: Path, result: Result) -> None:
    """Say how the job ended."""
    _replace(job_directory / RESULT_NAME, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def read_result(job_directory: Path) -> Result | None:
    """Return how the job ended; None while it has not."""
    path = job_directory / RESULT_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
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
