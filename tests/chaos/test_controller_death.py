"""The controller is killed in three phases of one job, and started again by the launcher each time."""

import contextlib
import os
import signal
import time
import urllib.request
from typing import Any

import psutil
import pytest

from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import FaultAction, InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, PATIENCE_S, Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

BUDGET = "recover_in_place per job"
GATE = 15
FAULTS = [
    inject(1, InjectionPoint.FORWARD, 6),
    # These newcomers stop themselves, which holds the recovery in its phase until they are told to go on.
    inject(2, InjectionPoint.FORWARD, 25),
    inject(2, InjectionPoint.JOIN, None, life=2, action=FaultAction.STOP),
    inject(3, InjectionPoint.FORWARD, 40),
    inject(3, InjectionPoint.REPAIR, None, life=2, action=FaultAction.STOP),
]


class Observed:
    """The statuses before and after each death, and the report in the end."""

    def __init__(self, job: Job) -> None:
        self.before: dict[str, JobStatus] = {}
        self.after: dict[str, JobStatus] = {}
        self._job = job
        self._in_running()
        self._in_phase("quiescing", newcomer=2)
        self._in_phase("rejoining", newcomer=3)
        self.numbers = scraped(job, self.after["rejoining"].term)
        self.report: dict[str, Any] = finish(job)

    def _in_running(self) -> None:
        self._kill_controller("running", self._job.held_at(GATE))
        self._job.open_gate(GATE)

    def _in_phase(self, phase: str, newcomer: int) -> None:
        status = self._job.until(
            lambda status: status.phase == phase and _is_stopped(status.ranks[newcomer].pid),
            f"rank {newcomer} to stop itself in {phase}",
        )
        self._kill_controller(phase, status)
        os.kill(status.ranks[newcomer].pid, signal.SIGCONT)

    def _kill_controller(self, phase: str, status: JobStatus) -> None:
        self.before[phase] = status
        os.kill(self._job.controller_pid(), signal.SIGKILL)
        self.after[phase] = self._job.until(lambda now: now.term > status.term, "the next controller")


def scraped(job: Job, term: int) -> dict[str, float]:
    """What the controller of a term tells Prometheus, by name and labels."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            address = (job.run_directory / "metrics.endpoint").read_text()
            with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
                lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if line[0] != "#"]
            numbers = {name: float(value) for name, _, value in lines}
            if numbers.get("midstep_controller_term") == term:
                return numbers
        time.sleep(0.1)
    raise AssertionError(f"no numbers of term {term}: {job.said()}")


def _is_stopped(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED


@pytest.fixture(scope="module")
def job(start_shared_job: StartJob) -> Job:
    return start_shared_job(faults=FAULTS, gates=[GATE], options=["--metrics-listen", "127.0.0.1:0"], **ONE_NODE)


@pytest.fixture(scope="module")
def observed(job: Job) -> Observed:
    return Observed(job)


@pytest.mark.parametrize("phase", ["running", "quiescing", "rejoining"])
def test_the_next_controller_goes_on_where_the_last_one_was(observed: Observed, phase: str) -> None:
    """It stands in the same phase and generation with the same processes, and no budget is reset."""
    before, after = observed.before[phase], observed.after[phase]
    assert after.phase == before.phase == phase
    assert after.generation == before.generation
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
    assert used(after) == used(before) == {"running": 1, "quiescing": 2, "rejoining": 3}[phase]


def test_the_incidents_end_as_if_the_controller_had_lived(observed: Observed) -> None:
    """One incident for each killed rank, none for the controller; nobody else is replaced and no step is lost."""
    incidents = observed.report["incidents"]
    assert len(incidents) == 3, incidents
    for incident, (rank, step) in zip(incidents, [(1, 6), (2, 25), (3, 40)], strict=True):
        assert_nobody_harmed(incident, {rank})
        assert incident["resumed_step"] == step
    assert {budget["name"]: budget["used"] for budget in observed.report["budgets"]}[BUDGET] == 3


def test_a_dead_controller_changes_no_bit(job: Job, observed: Observed, undisturbed: Record) -> None:
    """The training has not noticed."""
    assert observed.report["exit_code"] == 0
    assert_same_numbers(job.record(), undisturbed)


def used(status: JobStatus) -> int:
    """Return how much of the budget of `recover_in_place` is used."""
    return next(budget.used for budget in status.budgets if budget.name == BUDGET)


def test_the_time_between_two_controllers_is_told_as_unguarded(observed: Observed) -> None:
    """Three times a little; the rest of the job's time is told as if nothing had happened, and all of it adds up."""
    time = observed.report["time"]
    assert 0.0 < time["seconds"]["unguarded"] < time["wall_s"] / 2
    assert sum(time["seconds"].values()) == pytest.approx(time["wall_s"], rel=0.01)


def test_each_controller_serves_the_numbers_of_the_job(observed: Observed) -> None:
    """Those of the last one know of incidents that earlier ones have seen the end of."""
    numbers = observed.numbers
    # Which fault is heard of first, the end of a process or a collective that broke, is a matter of chance.
    ended = [count for name, count in numbers.items() if name.startswith("midstep_incidents_total{")]
    assert sum(ended) >= 2.0
    assert numbers['midstep_time_seconds_total{category="unguarded"}'] > 0.0
    assert numbers['midstep_budget_used{rung="recover_in_place",scope="job"}'] >= 3.0
    assert numbers["midstep_ranks_asked"] == 4.0
