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
from .jobs import ONE_NODE, ROOMY, TRAINING, Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

TASK = "5b1f0c1e-0d0c-4f6a"
IN_PLACE, MOVED, KILLED, LAST = GATES = (4, 10, 16, 22)
WAIT_S = 60.0
PAUSES = (4, 18, 32)
LONG_STEP_S = 0.2  # the boundary of a pause is a second ahead, and must lie before the next gate
BROKEN, SLOW = 1, 2  # ranks: one without another port, one whose port takes long
WITH_ACTIONS = f"""
import os, runpy, time
import midstep

def switch_nic(arguments):
    if arguments["ranks"] == os.environ["RANK"] == "{BROKEN}":
        raise RuntimeError("there is no second port")
    if arguments["ranks"] == os.environ["RANK"] == "{SLOW}":
        time.sleep({WAIT_S})

midstep.register_action("switch_nic", switch_nic)
midstep.register_action("stress_test", lambda _: "2-find fault rank" if os.environ["RANK"] == "3" else "0-OK")
runpy.run_path({str(TRAINING)!r}, run_name="__main__")
"""
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
    start_job: StartJob, undisturbed: Record, clusterd: PlayedClusterd, bridge: Bridge, tmp_path: Path
) -> None:
    """In place, then on another node; a killed rank is nothing to it. Each fault ends the subscription."""
    job = start_job(spares=1, gates=GATES, policy={**ROOMY, "deadlines": {"stop_grace_s": 2.0}})
    job.held_at(IN_PLACE)
    bridge(job)
    job.until(lambda _: clusterd.subscriptions == 1, "the subscription")
    clusterd.find([1])
    job.until(lambda status: bool(status.incidents), "the fault")
    pass_gate(job, IN_PLACE, 1)
    led = ["stopTrain", "stopped", "globalFault", "strategies", "changeStrategy recover", "status"]
    steps = ["preExitProcess", "told", *led]
    job.until(lambda _: clusterd.results == [("recover", 0)], "what came of it")
    assert walked(clusterd) == steps

    job.held_at(MOVED)
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
    (skipped,) = [each for each in second["decisions"][-1]["skipped"] if each["rung"] == "recover_in_place"]
    assert "SeparateNPU" in skipped["reason"]
    assert walked(clusterd) == []
    assert clusterd.faults_told == [(1, "1"), (2, "1")], "those that it has found itself"
    assert "keep-alive" not in (tmp_path / "clusterd.log").read_text()
    assert_same_numbers(job.record(), undisturbed)


def pass_pause(job: Job, step: int) -> None:
    """Let the job train to the boundary of a pause that ClusterD asks for."""
    job.until(lambda status: status.controls.pause is not None, "the pause")
    job.open_gate(step)


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


def test_what_clusterd_has_done_in_a_pause_harms_no_bit_and_what_it_finds_is_led_as_a_fault(
    start_job: StartJob, undisturbed: Record, clusterd: PlayedClusterd, bridge: Bridge, tmp_path: Path
) -> None:
    """All ranks switch; one cannot, and nothing is changed; a device is found bad, and its pod's ranks move."""
    script = tmp_path / "with_actions.py"
    script.write_text(WITH_ACTIONS)
    policy = {**ROOMY, "deadlines": {"stop_grace_s": 2.0}}
    job = start_job(step_s=LONG_STEP_S, spares=1, gates=PAUSES, script=script, policy=policy)
    job.held_at(PAUSES[0])
    bridge(job)
    job.until(lambda _: clusterd.subscriptions == 1, "the subscription")
    pause = ["stopTrain pause", "stopped"]
    fault = ["stopTrain", "stopped", "globalFault", "strategies", "changeStrategy recover", "status"]

    clusterd.switch_ports({0: True})
    pass_pause(job, PAUSES[0])
    job.until(lambda _: clusterd.said == ["finished"], "the switch")
    assert walked(clusterd) == [*pause, "switched", "changeStrategy continue", "status"]

    job.held_at(PAUSES[1])
    clusterd.switch_ports({BROKEN: True})
    pass_pause(job, PAUSES[1])
    job.until(lambda _: clusterd.results == [("recover", 0)], "what came of it")
    assert walked(clusterd) == [*pause, "switched", *fault]

    job.held_at(PAUSES[2])
    clusterd.strategies = ("recover",)
    clusterd.test({2: [0], 3: [0]})
    pass_pause(job, PAUSES[2])
    job.until(lambda _: clusterd.results == [("recover", 0)] * 2, "what came of it")
    assert walked(clusterd) == [*pause, "tested", *fault]
    assert clusterd.tested == {2: {0: ("0", "OK")}, 3: {0: ("2", "find fault rank")}}
    assert clusterd.said == ["finished", "failed", "failed"]

    *pauses, moved = finish(job)["incidents"]
    assert len(pauses) == 2  # the third one became that of the fault
    for each in pauses:
        assert_nobody_harmed({**each, "restore": "replica"}, set())
    assert moved["rung"] == "recover"
    assert_nobody_harmed(moved, {2, 3})
    assert_same_numbers(job.record(), undisturbed)


def test_a_rank_that_dies_in_a_pause_is_replaced_and_clusterd_hears_that_the_pause_is_over(
    start_job: StartJob, undisturbed: Record, clusterd: PlayedClusterd, bridge: Bridge, tmp_path: Path
) -> None:
    script = tmp_path / "with_actions.py"
    script.write_text(WITH_ACTIONS)
    job = start_job(step_s=LONG_STEP_S, gates=PAUSES[:1], script=script, policy=ROOMY, **ONE_NODE)
    job.held_at(PAUSES[0])
    bridge(job)
    job.until(lambda _: clusterd.subscriptions == 1, "the subscription")
    clusterd.switch_ports({SLOW: True})
    pass_pause(job, PAUSES[0])
    job.until(lambda status: status.controls.action is not None, "the switch")
    job.rank_process(SLOW).kill()
    job.until(lambda _: clusterd.results == [("recover", 0)], "what came of it")
    assert clusterd.said == ["a fault meanwhile", "failed"]
    report = finish(job)
    assert [each["replaced"] for each in report["incidents"] if each["replaced"]] == [[SLOW]]
    assert_same_numbers(job.record(), undisturbed)
