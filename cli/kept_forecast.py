"""The forecast of a job, kept in its directory, so that it is shown beside where the job's time really went.

`midstep simulate --beside JOB --keep` writes it; `status`, `report` and the page of that job read it.
"""

from pathlib import Path

import msgspec

from ..launch.reached_job import HereJob, ReachedJob
from ..protocol.errors import ConfigurationError
from ..protocol.private_files import replace_file
from ..protocol.time_spent import TimeSpent

FORECAST_NAME = "forecast.json"
MOST_BYTES = 1 << 16  # some hundred are needed


def keep_forecast(job: ReachedJob, forecast: TimeSpent) -> Path:
    """Keep a forecast with a job, in the place of an earlier one. Raises ConfigurationError."""
    if not isinstance(job, HereJob):
        raise ConfigurationError(f"--keep: job {job.name} is elsewhere. Simulate it where its job directory is.")
    path = job.directory / FORECAST_NAME
    try:
        replace_file(path, msgspec.json.encode(forecast))
    except OSError as error:
        raise ConfigurationError(
            f"{path}: the forecast cannot be kept: {error.strerror}. Leave out --keep, or see who may write there."
        ) from error
    return path


def kept_forecast(job: ReachedJob) -> TimeSpent | None:
    """Return the forecast that was kept with a job; None where there is none that can be read."""
    if not isinstance(job, HereJob):
        return None
    try:
        with (job.directory / FORECAST_NAME).open("rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=TimeSpent)
    except (OSError, msgspec.MsgspecError):
        return None
