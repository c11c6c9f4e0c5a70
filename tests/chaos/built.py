"""Which processes the agents of a job have built ahead."""

import re
import time

from .jobs import PATIENCE_S, Job


def built(job: Job) -> dict[int, int]:
    """Return the processes that the agents say they have built, with their ranks."""
    said = "".join(log.read_text() for log in (job.directory / "logs").glob("agent-*.log"))
    return {int(pid): int(rank) for pid, rank in re.findall(r"process (\d+) is built ahead for rank (\d+)", said)}


def wait_until_built(job: Job, number: int) -> None:
    """Wait until so many have been built, one after the other, since the job began."""
    deadline = time.monotonic() + PATIENCE_S
    while len(built(job)) < number:
        assert time.monotonic() < deadline, f"built are {built(job)}\n{job.said()}"
        time.sleep(0.05)
