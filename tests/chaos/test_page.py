"""The page of a real job tells of its incidents, and nothing that happens to the page happens to the job."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ..contract.served_page import heard, watching
from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

FIRST, SECOND = 8, 24  # gates


@contextmanager
def page_of(job: Job) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `midstep page`; yield its process and its port."""
    command = [sys.executable, "-m", "midstep.cli.main", "page", str(job.directory), "--listen", ":0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process, int(process.stdout.readline().split(" at ")[1].split()[0].rstrip("/").rpartition(":")[2])
        finally:
            process.kill()


def test_the_page_tells_of_an_incident_and_its_own_end_is_none(start_job: StartJob, undisturbed: Record) -> None:
    """A rank is killed before the eyes of a viewer, one while the page is frozen, and then the page itself."""
    job = start_job(nodes=1, ranks_per_node=4, gates=[FIRST, SECOND])
    job.held_at(FIRST)
    with page_of(job) as (page, port), watching(port) as stream:
        assert heard(stream, "head")["job"] == job.name
        victim = job.rank_process(1)
        job.open_gate(FIRST)
        victim.kill()
        while not (ended := heard(stream, "incidents")["ended"]):
            pass
        assert isinstance(ended, list)
        assert "SIGKILL" in json.dumps(ended[0]["causes"])
        assert ended[0]["rung"] == "recover_in_place"
        assert ended[0]["decisions"][0]["passed_over"][0]["rung"] == "retry_step"
        job.held_at(SECOND)
        page.send_signal(signal.SIGSTOP)
        victim = job.rank_process(2)
        job.open_gate(SECOND)
        victim.kill()
        job.until(lambda status: len(status.incidents) == 2, "the second incident")
    incidents = finish(job)["incidents"]
    assert len(incidents) == 2
    for incident, rank in zip(incidents, (1, 2), strict=True):
        assert_nobody_harmed(incident, {rank})
    assert_same_numbers(job.record(), undisturbed)
