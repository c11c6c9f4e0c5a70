"""The four incidents of the demo, one after the other in one job, with one spare node."""

from typing import Any

import pytest

from midstep.protocol.types import FaultAction, InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.both_devices(second_in_soak=True), pytest.mark.timeout(240)]

FAULTS = (
    inject(0, InjectionPoint.BACKWARD, 12, action=FaultAction.RAISE),
    inject(1, InjectionPoint.COLLECTIVE, 20),
    inject(3, InjectionPoint.FORWARD, 30, action=FaultAction.STOP),
    inject(2, InjectionPoint.UPDATE, 45, action=FaultAction.KILL_NODE),
)
EXPECTED = {
    "exception": ("recover_in_place", {0}, 12),
    "kill": ("recover_in_place", {1}, 20),
    "stall": ("recover_in_place", {3}, 30),
    "node lost": ("recover", {2, 3}, 45),
}


@pytest.fixture(scope="module")
def job(start_shared_job: StartJob) -> Job:
    return start_shared_job(spares=1, faults=FAULTS)


@pytest.fixture(scope="module")
def report(job: Job) -> dict[str, Any]:
    """The report of the job, which has come to its end."""
    return finish(job)


@pytest.fixture(scope="module")
def incidents(job: Job, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The incidents of the job, by what happened."""
    assert len(report["incidents"]) == len(EXPECTED), job.said()
    return dict(zip(EXPECTED, report["incidents"], strict=True))


@pytest.mark.parametrize("what", EXPECTED)
def test_only_what_broke_is_replaced(incidents: dict[str, dict[str, Any]], what: str) -> None:
    """The rung is the cheapest that fits, every healthy process keeps its pid, and no committed step is lost."""
    rung, replaced, step = EXPECTED[what]
    incident = incidents[what]
    assert_nobody_harmed(incident, replaced)
    assert incident["rung"] == rung
    assert incident["resumed_step"] in {step, step + 1}
    assert all(decision["reason"] for decision in incident["decisions"])


def test_the_time_of_the_job_adds_up_and_recoveries_take_what_the_incidents_say(report: dict[str, Any]) -> None:
    """Within a hundredth of the wall time; no node was waited for in an incident, and no controller was away."""
    time, incidents = report["time"], report["incidents"]
    spent = time["seconds"]
    assert sum(spent.values()) == pytest.approx(time["wall_s"], rel=0.01)
    assert time["goodput"] == spent["training"] / time["wall_s"]
    recovery_s = sum(spent[part] for part in ("detect", "restart", "quiesce", "rejoin", "first_step"))
    recorded_s = sum(incident["recovery_s"] for incident in incidents)
    assert recovery_s == pytest.approx(recorded_s, abs=0.01 * time["wall_s"])
    assert min(spent[part] for part in ("training", "start", "detect", "quiesce", "rejoin", "first_step")) > 0.0
    assert spent["unguarded"] == spent["planned_change"] == spent["checkpoint"] == 0.0


def test_only_the_rank_whose_train_function_failed_prints_a_traceback(
    job: Job, incidents: dict[str, dict[str, Any]]
) -> None:
    """The terminal shows what ranks print: of the survivors of each incident it is nothing."""
    assert incidents
    printed = {log.name: log.read_text() for log in (job.directory / "logs").glob("rank-*.log")}
    shown = {name: text for name, text in printed.items() if not name.endswith(".debug.log")}
    assert [name for name, text in shown.items() if "Traceback" in text] == ["rank-0.1.log"]
    assert shown["rank-0.1.log"].count("Traceback") == 1
    assert not [name for name, text in shown.items() if "Cannot extract tensors" in text or "interrupted" in text]
    assert any("follows from being interrupted" in printed[name] for name in printed.keys() - shown.keys())


def test_after_four_incidents_the_numbers_are_those_of_an_undisturbed_run(
    job: Job, incidents: dict[str, dict[str, Any]], undisturbed: Record
) -> None:
    """Parameters, buffers, optimizer, scheduler, random numbers, data position and losses are equal bit for bit."""
    assert incidents
    assert_same_numbers(job.record(), undisturbed)
