"""An operator on another machine than the controller's: what is typed there, and what it says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.incidents import JobStatus

from .conftest import StartJob
from .job import PORT, Job
from .machines import Machine

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

MIDSTEP = (sys.executable, "-m", "midstep.cli.main")
BEFORE, AFTER = 10, 40  # the steps at which the ranks are held


def made(job: Job, role: str) -> Path:
    """Make a token of a role on the controller's machine, as an operator does."""
    text = job.machines[0].run(*MIDSTEP, "token", "--role", role, "--token-file", str(job.root / "token"))
    path = job.root / f"{role}.token"
    path.touch(0o600)
    path.write_text(text)
    return path


def typed(machine: Machine, token: Path, *words: str) -> str:
    """Type a command on a machine whose environment names token and controllers; return all that it says."""
    where = (f"MIDSTEP_CONTROLLER=m2:{PORT},m0:{PORT}", f"MIDSTEP_TOKEN_FILE={token}", "MIDSTEP_HOME=/tmp/none")
    return machine.run("env", *where, "sh", "-c", 'exec "$@" 2>&1', "sh", *MIDSTEP, *words, check=False)


def watched_elsewhere(job: Job, machine: Machine, token: Path) -> None:
    """Leave a document of a cluster on a machine, and have it watched there, where the node has another name."""
    fault = {"npu_name": "Ascend910-1", "fault_code": "D0C", "fault_level": "NotHandleFault"}
    listed = {"DeviceList": {"huawei.com/Ascend910-Fault": json.dumps([fault])}}
    document = job.root / "cluster-info-device-0.json"
    document.write_text(json.dumps({"mindx-dl-deviceinfo-worker-7": listed}))
    where = {"MIDSTEP_CONTROLLER": f"m0:{PORT}", "MIDSTEP_TOKEN_FILE": str(token), "MIDSTEP_HOME": "/tmp/none"}
    words = ("detect", "--source", str(document), "--node-name", "worker-7=m1")
    machine.start((*MIDSTEP, *words), environment=where, output=job.root / "detect.log")


def data(machine: Machine, token: Path, command: str) -> dict[str, Any]:
    """The data that a command prints."""
    said = typed(machine, token, command, "--json")
    answer: dict[str, Any] = json.loads(said)
    return answer


def test_a_job_is_operated_from_another_machine_by_those_who_may(start_job: StartJob) -> None:
    """Each way goes over the network: there are no files of the job on that machine."""
    job = start_job(3, gates=(BEFORE, AFTER))
    viewer, operator = made(job, "viewer"), made(job, "operator")
    job.held_at(BEFORE)
    elsewhere = job.machines[2]

    seen = data(elsewhere, viewer, "status")
    assert (seen["live"], seen["job"], seen["phase"]) == (True, job.name, "running")
    assert "the role viewer may not stop the job: that takes the role operator" in typed(elsewhere, viewer, "stop")
    assert "may not inject a fault" in typed(elsewhere, viewer, "inject", "--rank", "0")
    assert "may not promote a controller: that takes the role admin" in typed(elsewhere, operator, "promote", "other")
    assert "may not pause the failover" in typed(elsewhere, operator, "pause-failover")
    assert "may not report faults" in typed(elsewhere, viewer, "detect", "--lines")
    watched_elsewhere(job, elsewhere, operator)
    assert typed(elsewhere, operator, "inject", "--rank", "0").startswith(f"{job.name}: armed: kill rank 0 now")

    job.open_gate(BEFORE)

    def recovered(status: JobStatus) -> bool:
        return any(incident.resumed_step is not None for incident in status.incidents)

    job.until(recovered, "the end of the incident")
    job.until(lambda status: bool(status.faults), "the fault in a document on another machine")
    (fault,) = [each["report"] for each in data(elsewhere, viewer, "status")["faults"]]
    assert (fault["node"], fault["device"], fault["code"]) == ("m1", 1, "D0C")
    incidents = data(elsewhere, viewer, "report")["incidents"]  # ranks that wait at a gate may be taken for stalled
    assert "recover_in_place" in [incident["rung"] for incident in incidents]
    assert f"Job {job.name}" in typed(elsewhere, viewer, "report")
    number = next(each["number"] for each in incidents if each["rung"] == "recover_in_place")
    story = typed(elsewhere, viewer, "report", "--story", "--incident", str(number))
    assert "process exited: rank 0" in story
    assert "start process: rank 0, incarnation 2" in story
    refused = data(elsewhere, viewer, "status")["refused"]
    assert refused["operators: viewer may not stop the job"] == 1
    job.kill_controller()
    job.answer()
    assert typed(elsewhere, viewer, "report", "--story", "--incident", str(number)) == story
    whole = typed(elsewhere, viewer, "report", "--story")
    assert story in whole
    assert "controller started: term 2" in whole

    assert "the job is being stopped" in typed(elsewhere, operator, "stop", "--reason", "seen enough")
    job.open_gate(AFTER)
    job.controller.wait(120)
    assert "nothing listens at" in typed(elsewhere, viewer, "status")
    assert "seen enough" in job.said()
