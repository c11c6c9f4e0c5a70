"""With `retry_unknown_exceptions`, a process that raises an exception of its own is kept, once for each incident."""

from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, ROOMY, Job, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


def raised(rank: int, point: InjectionPoint, step: int, *, life: int = 1) -> ArmedFault:
    return inject(rank, point, step, life=life, action=FaultAction.RAISE)


# The faults, the rungs taken, who is replaced, the step at which all resume.
CASES: dict[str, tuple[list[ArmedFault], list[str], set[int], int]] = {
    "in the forward pass": ([raised(0, InjectionPoint.FORWARD, 8)], ["retry_step"], set(), 8),
    "in a collective": ([raised(3, InjectionPoint.COLLECTIVE, 14)], ["retry_step"], set(), 14),
    "in the update": ([raised(1, InjectionPoint.UPDATE, 20)], ["retry_step"], set(), 21),
    "in two ranks at once": (
        [raised(1, InjectionPoint.BACKWARD, 26), raised(2, InjectionPoint.BACKWARD, 26)],
        ["retry_step"],
        set(),
        26,
    ),
    "and again when the step is repeated": (
        [raised(2, InjectionPoint.BACKWARD, 32), raised(2, InjectionPoint.BACKWARD, 32)],
        ["retry_step", "recover_in_place"],
        {2},
        32,
    ),
}
Incidents = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def retried(start_shared_job: StartJob) -> tuple[Job, Incidents]:
    faults = [fault for faults, *_ in CASES.values() for fault in faults]
    job = start_shared_job(faults=faults, policy={**ROOMY, "retry_unknown_exceptions": True}, **ONE_NODE)
    incidents = finish(job)["incidents"]
    assert len(incidents) == len(CASES), job.said()
    return job, dict(zip(CASES, incidents, strict=True))


@pytest.mark.parametrize("where", CASES)
def test_a_process_that_raised_is_kept_until_it_raises_again(retried: tuple[Job, Incidents], where: str) -> None:
    _, taken, who, step = CASES[where]
    incident = retried[1][where]
    assert list(dict.fromkeys(decision["rung"] for decision in incident["decisions"])) == taken, incident["reasons"]
    assert_nobody_harmed(incident, who)
    assert incident["resumed_step"] == step


def test_state_moves_only_where_an_update_was_interrupted_or_a_process_replaced(
    retried: tuple[Job, Incidents],
) -> None:
    moved = {where for where, incident in retried[1].items() if incident["bytes_moved"] > 10_000}
    assert moved == {"in the update", "and again when the step is repeated"}


def test_each_exception_is_shown_with_its_traceback(retried: tuple[Job, Incidents]) -> None:
    """In the rank's log and in the report: that the process lives on hides nothing.

    Of two ranks that raise at once, one may have been interrupted already: what it raises then follows from that.
    """
    job, incidents = retried
    shown = [(job.directory / "logs" / f"rank-{rank}.1.log").read_text().count("Traceback") for rank in range(4)]
    assert (shown[0], shown[3]) == (1, 1)
    assert 1 <= shown[1] <= 2
    assert 2 <= shown[2] <= 3
    assert shown[1] + shown[2] >= 4
    assert all(any("Traceback" in each["detail"] for each in found["reports"]) for found in incidents.values())


def test_retried_exceptions_change_no_bit(retried: tuple[Job, Incidents], undisturbed: Record) -> None:
    assert_same_numbers(retried[0].record(), undisturbed)
