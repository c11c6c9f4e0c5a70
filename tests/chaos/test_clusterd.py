"""A job beside a played ClusterD: what that finds is recovered by the ladder, and what it decides is obeyed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstep.controller.endpoints.control_requests import Accepted, ControlRequest
from midstep.protocol.controls import AllowRungs, ForbidRung
from midstep.protocol.types import Rung
from midstep.testing.played_clusterd import PlayedClusterd

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ROOMY, Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

TASK = "5b1f0c1e-0d0c-4f6a"
IN_PLACE, MOVED, KILLED, LAST = GATES = (4, 10, 16, 22)
WAIT_S = 60.0
Bridge = Callable[[Job], "subprocess.Popen[str]"]


@pytest.fixture
def clusterd() -> Iterator[PlayedClusterd]:
    played = PlayedClusterd(TASK, ["recover-in-place"], ranks_per_pod=2).start()
    yield played
    played.close()


@pytest.fixture
def bridge(clusterd: PlayedClusterd, tmp_path: Path) -> Iterator[Bridge]:
    """Start `midstep clusterd` for a job; kill it when the test is over."""
    started: list[subprocess.Popen[str]] = []

    def start(job: Job) -> "subprocess.Popen[str]":
        words = ["clusterd", str(job.directory), "--server", f"127.0.0.1:{clusterd.port}", "--task", TASK]
        command = [sys.executable, "-m", "midstep.cli.main", *words]
        with (tmp_path / "clusterd.log").open("a") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def walked(clusterd: PlayedClusterd) -> list[str]:
    """Return what was said since the last time, in order."""
    path, clusterd.path = clusterd.path, []
    return path


def pass_gate(job: Job, step: int, incidents: int) -> None:
    """Let the job train on, until so many incidents are over."""
    job.open_gate(step)
    job.until(
        lambda status: len([each for each in status.incidents if each.outcome == "resumed"]) == incidents,
        f"incident {incidents}",
    )


def test_what_clusterd_finds_is_recovered_and_answered_in_its_own_order(
    start_job: StartJob, undisturbed: Record, clusterd: PlayedClusterd, bridge: Bridge
) -> None:
    """In place, then on another node; a killed rank is nothing to it. It is cut off in between, and comes back."""
    job = start_job(spares=1, gates=GATES, policy={**ROOMY, "deadlines": {"stop_grace_s": 2.0}})
    job.held_at(IN_PLACE)
    bridge(job)
    job.until(lambda _: clusterd.subscriptions == 1, "the subscription")
    clusterd.find([1])
    job.until(lambda status: bool(status.incidents), "the fault")
    pass_gate(job, IN_PLACE, 1)
    steps = ["stopTrain", "stopped", "globalFault", "strategies", "changeStrategy recover", "status"]
    job.until(lambda _: clusterd.results == [("recover", 0)], "what came of it")
    assert walked(clusterd) == steps

    job.held_at(MOVED)
    clusterd.drop()
    clusterd.strategies = ("recover",)
    job.until(lambda _: clusterd.subscriptions == 2, "the next subscription")
    clusterd.find([2])
    job.until(lambda status: len(status.incidents) == 2, "the next fault")
    pass_gate(job, MOVED, 2)
    job.until(lambda _: clusterd.results == [("recover", 0)] * 2, "what came of it")
    assert walked(clusterd) == steps

    os.kill(next(rank.pid for rank in job.held_at(KILLED).ranks if rank.rank == 0), signal.SIGKILL)
    pass_gate(job, KILLED, 3)
    job.held_at(LAST)
    clusterd.close()
    job.open_gate(LAST)
    first, second, third = finish(job)["incidents"]
    for incident, rung, replaced in (
        (first, "recover_in_place", {1}),
        (second, "recover", {2, 3}),
        (third, "recover_in_place", {0}),
    ):
        assert incident["rung"] == rung, incident
        assert_nobody_harmed(incident, replaced)
    assert "ClusterD" in first["reports"][0]["detail"]
    assert walked(clusterd) == []
    assert clusterd.faults_told == []
    assert_same_numbers(job.record(), undisturbed)


def test_clusterd_is_told_of_a_node_that_is_needed_and_its_dump_ends_the_job(
    start_job: StartJob, clusterd: PlayedClusterd, bridge: Bridge
) -> None:
    """The job's checkpoint is written first, and ClusterD learns that it was."""
    job = start_job(spares=1, gates=(IN_PLACE, MOVED), policy={**ROOMY, "deadlines": {"stop_grace_s": 2.0}})
    held = job.held_at(IN_PLACE)
    for rung in (Rung.RECOVER_IN_PLACE, Rung.RECOVER):
        assert isinstance(job.ask(ControlRequest(ForbidRung(rung, WAIT_S), "test", "restart all")), Accepted)
    process = bridge(job)
    job.until(lambda _: clusterd.subscriptions == 1, "the subscription")
    clusterd.strategies = ("recover",)
    os.kill(next(rank.pid for rank in held.ranks if rank.rank == 3), signal.SIGKILL)
    job.until(lambda _: clusterd.faults_told == [(3, "1")], "what is told to ClusterD")
    job.open_gate(IN_PLACE)
    job.until(lambda _: clusterd.results == [("recover", 0)], "what came of it")
    job.held_at(MOVED)
    assert isinstance(job.ask(ControlRequest(AllowRungs(), "test", "that was enough")), Accepted)
    clusterd.strategies = ("dump",)
    clusterd.find([0])
    job.until(lambda status: len(status.incidents) == 2, "the fault")
    job.open_gate(MOVED)
    job.wait(WAIT_S)
    assert process.wait(WAIT_S) == 0
    assert clusterd.results[-1] == ("dump", 0)
    assert "emergency checkpoint of step" in job.report()["reason"]


def test_a_job_that_clusterd_does_not_know_is_refused_in_one_line(
    start_job: StartJob, clusterd: PlayedClusterd
) -> None:
    job = start_job(gates=(IN_PLACE,), nodes=1, ranks_per_node=1, steps=MOVED)
    job.held_at(IN_PLACE)
    words = ["clusterd", str(job.directory), "--server", f"127.0.0.1:{clusterd.port}", "--task", "another"]
    done = subprocess.run(
        [sys.executable, "-m", "midstep.cli.main", *words], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 1
    assert "process-recover-enable" in done.stderr.splitlines()[-1]
    job.open_gate(IN_PLACE)
    assert job.wait(WAIT_S) == 0


def test_a_switch_that_fails_is_no_end_of_the_job(
    start_job: StartJob, undisturbed: Record, clusterd: PlayedClusterd, bridge: Bridge
) -> None:
    job = start_job(gates=(IN_PLACE,), policy=ROOMY)
    job.held_at(IN_PLACE)
    bridge(job)
    job.until(lambda _: clusterd.subscriptions == 1, "the subscription")
    clusterd.switch_ports({1: True})
    job.until(lambda status: status.controls.pause is not None, "the pause")
    job.open_gate(IN_PLACE)
    job.until(lambda _: clusterd.results == [("recover", 0)], "what came of it")
    (pause,) = finish(job)["incidents"]
    assert_nobody_harmed({**pause, "restore": "replica"}, set())
    assert clusterd.said == ["failed"]
    assert walked(clusterd)[:4] == ["stopTrain pause", "stopped", "switched", "stopTrain"]
    assert_same_numbers(job.record(), undisturbed)
