"""A job beside a played TaskD, which leads it through MindIO's controller in a process of its own."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstep.adapters.mindio.package import path_with_package
from midstep.protocol import environment as names

from .comparing import assert_nobody_harmed
from .conftest import StartJob
from .jobs import ONE_NODE, ROOMY, Job

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

TASKD = Path(__file__).with_name("played_taskd.py")
FIRST, SECOND, LAST = GATES = (4, 10, 30)
STEP_S = 0.2  # the boundary of a pause is a second ahead, and must lie before the next gate
WAIT_S = 90.0


class Taskd:
    """A process with TaskD in it: what it is to do is said to it, and what it hears is read from it."""

    def __init__(self, job: Job, log: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": path_with_package(os.environ.get("PYTHONPATH", "")),
            names.JOB_DIRECTORY: str(job.directory),
        }
        self._heard: queue.Queue[dict[str, Any]] = queue.Queue()
        with log.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(TASKD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env=environment,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, *actions: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"actions": actions, **fields}) + "\n")
        self.process.stdin.flush()

    def hear(self, action: str) -> dict[str, Any]:
        message = self._heard.get(timeout=WAIT_S)
        assert message["action"] == action
        return message

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._heard.put(json.loads(line))


@pytest.fixture
def started() -> Iterator[list[Taskd]]:
    found: list[Taskd] = []
    yield found
    for each in found:
        each.process.kill()
        each.process.wait()


def test_taskd_leads_a_job_through_a_fault_a_pause_and_a_dump(
    start_job: StartJob, started: list[Taskd], tmp_path: Path
) -> None:
    """In place, then standing still, then with a checkpoint at the end: the callbacks hear of each."""
    policy = {**ROOMY, "deadlines": {"stop_grace_s": 2.0, "device_s": WAIT_S}}
    job = start_job(step_s=STEP_S, gates=GATES, policy=policy, **ONE_NODE)
    job.held_at(FIRST)
    taskd = Taskd(job, tmp_path / "taskd.log")
    started.append(taskd)
    taskd.hear("started")
    taskd.say("stop_train", fault_ranks={"1": "1"})
    job.until(lambda status: bool(status.incidents), "the fault")
    job.open_gate(FIRST)
    assert taskd.hear("stop_complete")["code"] == 0
    taskd.say("on_global_rank", fault_ranks={"1": "1"})
    assert "recover" in taskd.hear("recover_strategy")["strategy_list"]
    taskd.say("change_strategy", strategy="recover")
    said = taskd.hear("recover_status")
    assert (said["code"], said["strategy"]) == (0, "recover")

    job.held_at(SECOND)
    taskd.say("pause_train")
    job.until(lambda status: status.controls.pause is not None, "the pause")
    job.open_gate(SECOND)
    assert taskd.hear("stop_complete")["code"] == 0
    taskd.say("change_strategy", strategy="continue")
    said = taskd.hear("recover_status")
    assert (said["code"], said["strategy"]) == (0, "continue")

    job.held_at(LAST)
    taskd.say("save_and_exit")
    job.open_gate(LAST)
    said = taskd.hear("recover_status")
    assert (said["code"], said["strategy"]) == (0, "dump")
    job.wait(WAIT_S)
    assert taskd.process.stdin is not None
    taskd.process.stdin.close()
    assert taskd.process.wait(WAIT_S) == 0
    assert "Fatal" not in (tmp_path / "taskd.log").read_text()
    report = job.report()
    assert "emergency checkpoint of step" in report["reason"]
    assert report["incidents"][0]["rung"] == "recover_in_place"
    assert_nobody_harmed(report["incidents"][0], {1})
