"""The controller: killed, moved, hung, kept from starting."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from midstep.controller.journal.sqlite_file import journal_path
from midstep.processor.checkpoints import archive
from midstep.protocol.incidents import JobStatus
from midstep.protocol.messages import IntroduceNode, NodeHeartbeat, NodeJoined

from ..chaos.agent.conftest import Site
from ..chaos.controller.conftest import Cluster
from ..chaos.jobs import PATIENCE_S, ROOMY, Job
from .attack import attack

ENDPOINT_FILE = "controller.endpoint"
SLEEPER = "import time\nprint('sleeping', flush=True)\ntime.sleep(600)\n"


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    """Hold a port, as a program does that got it when the controller was gone."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                listener.bind(("127.0.0.1", port))
                break
            except OSError:  # the kernel still clears away after the one that was killed
                assert time.monotonic() < deadline, "the port does not become free: the successor was faster"
                time.sleep(0.002)
        listener.listen()
        yield


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: unix sockets allow no long ones."""
    path = Path(tempfile.mkdtemp(prefix="ms-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.chaos
@attack(
    "another program takes the port of a controller that died; its successor listens elsewhere",
    holds="every agent finds the successor, and its ranks keep their processes",
    reads="`the controller listens at ... now` in the agent's log",
)
def test_an_agent_finds_a_controller_that_had_to_move(root: Path) -> None:
    """The agent joins at the new place with the process that it had, and keeps beating there."""

    async def scenario(site: Site) -> None:
        await site.agent()
        site.welcome(SLEEPER)
        site.start(0)
        before = await site.started(0)
        controller = site.controller
        port = int(controller.router.endpoint.rpartition(":")[2])
        controller.router.close()
        with taken(port):
            controller.heard.clear()
            controller.term += 1
            controller._open("tcp://127.0.0.1:0")
            (root / ENDPOINT_FILE).write_text(f"{controller.router.endpoint}\n")
            await controller.until(NodeHeartbeat)
            controller.order(IntroduceNode())
            joined = await controller.until(NodeJoined)
            assert joined.processes == (before.process,)

    async def run() -> None:
        site = Site(root, 1)
        try:
            await scenario(site)
        finally:
            site.close()

    asyncio.run(run())


@pytest.mark.chaos
@attack(
    "the disk of the run directory becomes full, then the controller is killed",
    holds="the next one comes up all the same, at the same place: it needs no space there",
)
def test_a_controller_comes_back_on_a_full_run_directory(root: Path) -> None:
    """Its endpoint is written already, and a socket takes no block."""
    cluster = Cluster()
    mounted = cluster.root / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        cluster.close()
        pytest.skip("a small disk can be had by root only")
    try:
        cluster.run_directory = Path(shutil.copytree(cluster.run_directory, mounted / "run"))
        cluster.run_directory.chmod(0o700)
        cluster.keys = cluster.run_directory / "keys"
        cluster.start()
        with contextlib.suppress(OSError), (mounted / "full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        term = cluster.status().term
        cluster.kill_controller()
        cluster.start_controller()
        cluster.until(lambda: cluster.status().term > term and cluster.phase() == "running")
    finally:
        for controller in cluster.controllers:
            controller.kill()
            controller.wait(10)
        subprocess.run(["umount", "-l", str(mounted)], check=True)
        cluster.close()


# --- whole jobs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start one job that trains until it is stopped."""
    jobs: list[Job] = []

    def start_job(**controller: Any) -> Job:
        jobs.append(Job(tmp_path, policy={**ROOMY, "controller": controller}, steps=100_000))
        return jobs[0]

    yield start_job
    for job in jobs:
        job.close()


def trained(job: Job) -> int:
    """How many steps rank 0 has written down."""
    path = job.records / "steps.0"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(job: Job, holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert job.launcher.poll() is None, f"the job ended while waiting for {what}:\n{job.said()}"
        assert time.monotonic() < deadline, f"still waiting for {what}:\n{job.said()}"
        time.sleep(0.05)


def goes_on(job: Job) -> None:
    """The training continues."""
    before = trained(job)
    wait_for(job, lambda: trained(job) > before + 5, "some steps")


def kill_controller(job: Job) -> None:
    os.kill(job.controller_pid(), signal.SIGKILL)


def steps(status: JobStatus) -> int:
    """Return the step of the rank that is least far: of what heartbeats have said to this controller."""
    return min(rank.step for rank in status.ranks)


def pids(status: JobStatus) -> list[int]:
    return [rank.pid for rank in status.ranks]


def shown(job: Job) -> str:
    """What `midstep status` says besides the tables."""
    command = [sys.executable, "-m", "midstep.cli.main", "status", str(job.directory)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stderr


@pytest.mark.soak
@pytest.mark.chaos
@pytest.mark.timeout(180)
@attack(
    "kill -9 of a job's controller while its port is taken, then its keys are removed, so that no controller comes up",
    holds="the training continues with the same processes; the successor knows them all; Ctrl-C ends the job in order",
    reads="`NO CONTROLLER for ... s`, in `midstep status`, too, and what is not saved",
)
def test_a_job_outlives_its_controllers(start: Callable[..., Job]) -> None:
    """Moved, lost, found again, and lost for good: no process is replaced, and the user reads it each time."""
    job = start(lost_after_s=1)
    first = job.until(lambda status: status.phase == "running" and status.committed >= 5, "some steps")

    endpoint = job.run_directory / ENDPOINT_FILE
    old = endpoint.read_text()
    kill_controller(job)
    with taken(int(old.rpartition(":")[2])):
        second = job.until(lambda status: status.term > first.term, "the next controller")
        assert endpoint.read_text() != old
        third = job.until(lambda status: steps(status) > steps(second), "word of every node at the new place")
    assert (third.phase, third.incidents, pids(third)) == ("running", (), pids(first))

    keys = job.run_directory / "keys"
    away = keys.with_name("keys.away")
    keys.rename(away)
    kill_controller(job)
    wait_for(job, lambda: "NO CONTROLLER" in job.said(), "the loss to be said")
    goes_on(job)
    assert "training is unguarded" in shown(job)
    away.rename(keys)
    fourth = job.until(lambda status: status.term > third.term, "a controller again")
    assert (fourth.incidents, pids(fourth)) == ((), pids(first))

    keys.rename(away)
    kill_controller(job)
    goes_on(job)
    os.killpg(job.launcher.pid, signal.SIGINT)
    assert job.wait() == 130, job.said()
    assert "there is no emergency checkpoint" in job.said()
    job.assert_nothing_left()


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_job_whose_journal_cannot_be_written_is_saved_by_a_controller_of_last_resort(
    start: Callable[..., Job],
) -> None:
    """Ranks park, the emergency checkpoint is complete, all ends in order, and status knows how."""
    job = start(lost_after_s=1, when_lost="stop")
    job.until(lambda status: status.phase == "running" and status.committed >= 5, "some steps")
    with contextlib.closing(sqlite3.connect(journal_path(job.directory), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        kill_controller(job)
        assert job.wait() == 130, job.said()
        assert "no controller could be kept running" in job.said()
    step = archive.complete_steps(job.directory / "checkpoints")[-1]
    assert f"an emergency checkpoint of step {step} is at" in job.said()
    assert "ended without a controller that could record it" in shown(job)
    job.assert_nothing_left()
