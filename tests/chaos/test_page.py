"""The page of a real job tells of its incidents, and nothing that happens to the page happens to the job."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from midstep.agent.fork_server import PRELOAD_STORE
from midstep.protocol import environment as names

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


def test_a_page_that_runs_with_a_job_ends_with_it(tmp_path: Path) -> None:
    """`midstep run --page` says where it is; it serves the job while that runs, and has gone with the launcher."""
    for number, ends_by_itself in enumerate((True, False)):
        looked_at = tmp_path / f"looked-at-{number}"
        options = ["--job-dir", str(tmp_path / str(number)), "--fixed-nodes", "--page", ":0", "--no-python"]
        program = ["sh", "-c", f"until [ -e {looked_at} ]; do sleep 0.1; done"]
        command = [sys.executable, "-m", "midstep.cli.main", "run", *options, *program]
        environment = {**os.environ, names.PRELOAD: PRELOAD_STORE}  # there is no torch in that program
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
        ) as launcher:
            try:
                assert launcher.stderr is not None
                address = next(line for line in launcher.stderr if "the page is at" in line).split(" at ")[1].split()[0]
                port = int(address.rstrip("/").rpartition(":")[2])
                with watching(port) as stream:
                    assert heard(stream, "head")["job"]
                if ends_by_itself:
                    looked_at.touch()
                    launcher.stderr.read()
                    assert launcher.wait(60) == 0
                else:
                    launcher.kill()
            finally:
                launcher.kill()
        gone_s = time.monotonic() + 30.0
        while served(port):
            assert time.monotonic() < gone_s
            time.sleep(0.2)


def served(port: int) -> bool:
    """Whether anything listens at a port."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
