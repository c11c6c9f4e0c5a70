"""A fault of each level, reported as by a detector, one after the other in one job with real processes."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from midstep.cli.inject import report_of
from midstep.controller.endpoints.control_requests import Accepted, InjectRequest
from midstep.policies.fault_codes import LevelName
from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import ArmedFault, FaultAction, FaultLevel

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ROOMY, Job, Record

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(240)]


class Case(NamedTuple):
    """A level, where it is reported, and what has to follow."""

    what: str
    rank: int
    rung: str
    replaced: frozenset[int]
    passes: bool = False  # the device becomes well again while its process waits
    dies: bool = False  # nothing follows until the process fails
    written: bool = False  # in a document, as a cluster's device plugin writes it


BY_CODE = "80E01801"  # RestartBusiness

CASES = {
    case.what: case
    for case in (
        Case(LevelName.RESTART_REQUEST, 0, "recover_in_place", frozenset({0}), passes=True),
        Case(BY_CODE, 3, "recover_in_place", frozenset({3}), passes=True),
        Case(LevelName.RESTART_BUSINESS, 2, "recover", frozenset({2, 3})),  # and the device does not become well
        Case(LevelName.FREE_RESTART_NPU, 1, "recover", frozenset({0, 1})),
        Case(LevelName.RESTART_NPU, 2, "recover", frozenset({2, 3})),
        Case(LevelName.SEPARATE_NPU, 0, "recover", frozenset({0, 1}), written=True),
        Case(LevelName.MANUALLY_SEPARATE_NPU, 3, "recover", frozenset({2, 3})),
        Case(LevelName.PRE_SEPARATE_NPU, 1, "recover", frozenset({0, 1}), dies=True),
    )
}
NOTED = (LevelName.NOT_HANDLE_FAULT, LevelName.PRE_SEPARATE_NPU)
SPARES = sum(case.rung == "recover" for case in CASES.values())
GATES = tuple(4 + 6 * index for index in range(len(CASES)))


@pytest.fixture(scope="module")
def job(start_shared_job: StartJob, documents: Path) -> Job:
    policy = {**ROOMY, "deadlines": {"stop_grace_s": 2.0, "device_s": 1.0}}
    return start_shared_job(spares=SPARES, policy=policy, gates=GATES, options=["--fault-source", str(documents)])


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the job watches."""
    return tmp_path_factory.mktemp("documents")


def write(documents: Path, case: Case, node: str) -> None:
    """Leave a document about the device of the case's rank."""
    fault = {"npu_name": f"npu-{case.rank % 2}", "fault_code": "80818C00", "fault_level": case.what}
    listed = {"huawei.com/npu-Fault": json.dumps([fault])}
    path = documents / f"mindx-dl-deviceinfo-{node}.json"
    draft = documents / ".draft"
    draft.write_text(json.dumps({"DeviceInfo": {"DeviceList": listed, "UpdateTime": 0}}))
    draft.replace(path)


def decided(number: int, status: JobStatus) -> bool:
    """Whether a rung was chosen for an incident with this index."""
    return any(incident.decisions for incident in status.incidents[number:])


@pytest.fixture(scope="module")
def incidents(job: Job, documents: Path) -> dict[str, dict[str, Any]]:
    """The incidents of the job, by what was reported."""
    for number, (gate, case) in enumerate(zip(GATES, CASES.values(), strict=True)):
        status = job.held_at(gate)
        for noted in NOTED:  # nothing follows from these, however often they come
            assert isinstance(job.ask(report_of(noted, case.rank, None, None)), Accepted)
            assert isinstance(job.ask(report_of(noted, case.rank, None, None, recover=True)), Accepted)
        assert len(job.until(lambda status: True, "a status").incidents) == number
        if case.written:
            write(documents, case, status.ranks[case.rank].node)
        else:
            assert isinstance(job.ask(report_of(case.what, case.rank, None, None)), Accepted)
        if case.dies:
            assert isinstance(job.ask(InjectRequest(ArmedFault(case.rank, FaultAction.KILL))), Accepted)
        # A detector's word about memory waits a moment for the process's own; until then all stay at the gate.
        job.until(partial(decided, number), "the decision")
        if case.passes:
            assert isinstance(job.ask(report_of(case.what, case.rank, None, None, recover=True)), Accepted)
        job.open_gate(gate)
    report = finish(job)
    assert len(report["incidents"]) == len(CASES), job.said()
    return dict(zip(CASES, report["incidents"], strict=True))


@pytest.mark.parametrize("what", CASES)
def test_a_device_fault_takes_the_rung_of_its_level(incidents: dict[str, dict[str, Any]], what: str) -> None:
    """The rung is the one of the table, every healthy process keeps its pid, and no committed step is lost."""
    case, incident = CASES[what], incidents[what]
    assert incident["rung"] == case.rung
    assert_nobody_harmed(incident, set(case.replaced))
    (report,) = incident["reports"][:1]
    assert report["rank"] == case.rank
    assert case.dies or report["seen_by"] == ("detector/files" if case.written else "detector/inject")


def test_no_level_of_a_device_is_left_out() -> None:
    """Each is in the table above, is noted beside every case of it, or is drained in `test_draining`."""
    of_devices = {name for name in LevelName if name.value in {level.value for level in FaultLevel}}
    assert of_devices == {*map(LevelName, {*CASES} - {BY_CODE}), *NOTED, LevelName.SUB_HEALTH_FAULT}
    assert len(of_devices) == 9  # MindCluster's eight, and ManuallySeparateNPU


def test_a_process_on_a_device_that_is_to_be_left_comes_back_on_another_node(
    incidents: dict[str, dict[str, Any]],
) -> None:
    (decision,) = incidents[LevelName.PRE_SEPARATE_NPU]["decisions"]
    (skipped,) = [each for each in decision["skipped"] if each["rung"] == "recover_in_place"]
    assert "is to get no new process: PreSeparateNPU of device 1 stands there" in skipped["reason"]


def test_a_device_that_does_not_become_well_in_time_fails_the_restart_in_place(
    incidents: dict[str, dict[str, Any]],
) -> None:
    decisions = incidents[LevelName.RESTART_BUSINESS]["decisions"]
    assert [decision["rung"] for decision in decisions] == ["recover_in_place", "recover"]
    (skipped,) = [each for each in decisions[-1]["skipped"] if each["rung"] == "recover_in_place"]
    assert "RestartBusiness of the device of rank 2 still stands after 1 s" in skipped["reason"]


def test_after_a_fault_of_each_level_the_numbers_are_those_of_an_undisturbed_run(
    job: Job, incidents: dict[str, dict[str, Any]], undisturbed: Record
) -> None:
    """Parameters, buffers, optimizer, scheduler, random numbers, data position and losses are equal bit for bit."""
    assert incidents
    assert_same_numbers(job.record(), undisturbed)
