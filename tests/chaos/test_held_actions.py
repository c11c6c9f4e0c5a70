"""Ranks perform actions while an operator's pause holds them: of the device, of the script; no bit changes."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from midstep.protocol.controls import StandingAction
from midstep.protocol.incidents import JobStatus

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, TRAINING, Job, Record
from .test_draining import STEP_S, assert_no_step_repeated

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

FIRST, SECOND = 8, 40  # gates
WITHIN_S = 60.0
WHY = "a switch is serviced"
SCRIPT = f"""
import os, pathlib, runpy, time
import midstep

def check(arguments):
    if os.environ["RANK"] == arguments.get("broken"):
        raise RuntimeError("cable 7 is loose")
    pathlib.Path(arguments["begun"] + os.environ["RANK"]).touch()
    while "until" in arguments and not pathlib.Path(arguments["until"]).exists():
        time.sleep(0.05)
    return "checked"

midstep.register_action("check", check)
runpy.run_path({str(TRAINING)!r}, run_name="__main__")
"""


def begin(job: Job, action: str, *words: str) -> "subprocess.Popen[str]":
    """Start `midstep perform`, as an operator does, and have the job train on to the boundary."""
    command = ["perform", action, str(job.directory), "--why", WHY, "--within", f"{WITHIN_S:.0f}s", *words]
    process = subprocess.Popen(
        [sys.executable, "-m", "midstep.cli.main", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job.until(lambda status: status.controls.pause is not None, "the pause")
    return process


def told(process: "subprocess.Popen[str]", exit_code: int) -> str:
    """What the command has printed."""
    said, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == exit_code, said
    return " ".join(said.split())


def standing(status: JobStatus) -> StandingAction:
    """The action as the status has it."""
    assert status.controls.action is not None
    return status.controls.action


def has_answered(status: JobStatus, rank: int) -> bool:
    """Whether a rank has said what became of the action."""
    action = status.controls.action
    return action is not None and rank in {result.rank for result in action.results}


def make_script(folder: Path) -> Path:
    """Write the training, with an action of its own."""
    script = folder / "with_action.py"
    script.write_text(SCRIPT)
    return script


def test_devices_are_tested_and_network_cards_switched_between_two_steps(
    start_job: StartJob, undisturbed: Record
) -> None:
    """The ranks that are named perform it, all stand still, and all train on with the same processes and bits."""
    job = start_job(step_s=STEP_S, gates=[FIRST, SECOND], device="fake", **ONE_NODE)
    before = {rank.pid for rank in job.held_at(FIRST).ranks}
    tested = begin(job, "stress_test", "--ranks", "1-2")
    job.open_gate(FIRST)
    said = told(tested, 0)
    assert "stress_test: performed by 2 of 2 ranks rank 1: ok, 0-OK rank 2: ok, 0-OK" in said
    job.held_at(SECOND)
    switched = begin(job, "switch_nic", "--set", "ranks=0,3", "--set", "use_backup=1,1")
    job.open_gate(SECOND)
    assert "performed by 4 of 4 ranks" in told(switched, 0)
    report = finish(job)
    assert [each["what"] for each in report["controls"]] == [
        "pause for up to 720 s",
        "perform stress_test",
        "train on",
        "pause for up to 720 s",
        "perform switch_nic",
        "train on",
    ]
    for pause in report["incidents"]:
        assert_nobody_harmed({**pause, "restore": "replica"}, set())
        assert {int(pid) for pid in pause["pids_after"].values()} == before
    assert_no_step_repeated(job)
    assert_same_numbers(job.record(), undisturbed)


def test_an_action_of_the_script_outlives_its_controller_and_its_failure_harms_nothing(
    start_job: StartJob, undisturbed: Record, tmp_path: Path
) -> None:
    job = start_job(step_s=STEP_S, gates=[FIRST], script=make_script(tmp_path), **ONE_NODE)
    job.held_at(FIRST)
    begun, go = tmp_path / "begun", tmp_path / "go"
    arguments = {"begun": begun, "until": go, "broken": 2}
    process = begin(job, "check", *(word for key, value in arguments.items() for word in ("--set", f"{key}={value}")))
    job.open_gate(FIRST)
    job.until(lambda status: has_answered(status, 2), "the failure of rank 2")
    psutil.Process(job.controller_pid()).kill()
    status = job.until(lambda status: status.term == 2 and status.held, "the next controller")
    assert standing(status).waiting == {0, 1, 3}
    go.touch()
    said = told(process, 1)
    assert "performed by 3 of 4 ranks; rank 2: RuntimeError: cable 7 is loose" in said
    assert "check has failed on rank 2" in said
    report = finish(job)
    assert_nobody_harmed({**report["incidents"][0], "restore": "replica"}, set())
    assert_no_step_repeated(job)
    assert_same_numbers(job.record(), undisturbed)


def test_a_rank_that_dies_in_an_action_is_replaced_and_the_job_trains_on(
    start_job: StartJob, undisturbed: Record, tmp_path: Path
) -> None:
    """The others go back to training although the action still runs in them; the command says who has not answered."""
    job = start_job(step_s=STEP_S, gates=[FIRST], script=make_script(tmp_path), **ONE_NODE)
    job.held_at(FIRST)
    begun, go = tmp_path / "begun", tmp_path / "go"
    process = begin(job, "check", "--set", f"begun={begun}", "--set", f"until={go}")
    job.open_gate(FIRST)
    job.until(lambda _: all(Path(f"{begun}{rank}").exists() for rank in range(4)), "the action in all ranks")
    job.rank_process(1).kill()
    said = told(process, 1)
    assert "performed by 0 of 4 ranks; rank 0: a fault came between" in said
    go.touch()
    report = finish(job)
    fault = next(each for each in report["incidents"] if each["replaced"])
    assert fault["replaced"] == [1]
    assert_same_numbers(job.record(), undisturbed)
