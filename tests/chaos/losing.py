"""Jobs that lose ranks at chosen moments, one incident after the other, held against an undisturbed one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from midstep.protocol.incidents import JobStatus

from .comparing import finish
from .jobs import Job, Record

Keep = Callable[[Job], Job]


@contextmanager
def closing() -> Iterator[Keep]:
    """Yield what takes a job and returns it; what is left of those that it took is killed in the end."""
    with ExitStack() as ending:

        def keep(job: Job) -> Job:
            ending.callback(job.close)
            return job

        yield keep


def incidents_of(job: Job, gates: Sequence[int], patience_s: float) -> list[dict[str, Any]]:
    """Open each gate when one incident more is over, wait for the end, and return the incidents of the report."""
    for over, gate in enumerate(gates, start=1):
        job.until(partial(_are_over, over), f"the end of incident {over}", patience_s)
        job.open_gate(gate)
    assert job.wait(patience_s) == 0, job.said()
    incidents: list[dict[str, Any]] = finish(job)["incidents"]
    assert len(incidents) == len(gates) + 1, job.said()
    return incidents


def calm_record(job: Job, patience_s: float) -> Record:
    """Return the record of a run to which nothing happens."""
    assert job.wait(patience_s) == 0, job.said()
    assert not finish(job)["incidents"], job.said()
    return job.record()


def _are_over(count: int, status: JobStatus) -> bool:
    return status.phase == "running" and len(status.incidents) >= count
