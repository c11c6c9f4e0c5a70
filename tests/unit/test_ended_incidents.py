"""A platform hears of the incidents of its job that are over, in a line each, asked for as a viewer."""

import asyncio

import pytest

from midstep.cli.ended_incidents import ended_incidents
from midstep.controller.endpoints.control_requests import IncidentsReply, IncidentsRequest, Refused, Reply, Request
from midstep.launch.reached_job import JobElsewhere
from midstep.platforms.base import EndedIncident
from midstep.protocol.errors import MidstepError
from midstep.protocol.identities import Role
from midstep.protocol.incidents import Incident, Outcome
from midstep.protocol.token import new_token
from midstep.protocol.types import Decision, FaultKind, FaultReport, Rung

TOKEN = new_token(job="demo")


def incident(number: int, outcome: Outcome, *rungs: Rung) -> Incident:
    """Return an incident of a rank that has ended."""
    report = FaultReport(FaultKind.EXIT, 10.0, "agent/node0", "signal 9", rank=1, node="node0")
    waits = FaultReport(FaultKind.COMMUNICATION, 9.9, "rank/2", "reset by peer", rank=2, node="node1")
    decisions = tuple(Decision(rung, "why") for rung in rungs)
    return Incident(number, 10.0, (waits, report, report), decisions, resumed_step=4, resumed_s=10.5, outcome=outcome)


async def told() -> tuple[EndedIncident, ...]:
    """Return all that a platform is told."""
    return await ended_incidents("demo", ["tcp://here:1"], TOKEN)(0)


HAD = (
    incident(1, Outcome.RESUMED, Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE),
    incident(2, Outcome.DISMISSED),
    incident(3, Outcome.STOPPED, Rung.STOP),
    incident(4, Outcome.OPEN, Rung.RECOVER),
)


def test_incidents_that_are_over_are_told_in_a_line_with_the_nodes_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Role]] = []

    def ask(job: JobElsewhere, request: Request, timeout_s: float) -> Reply:
        assert isinstance(request, IncidentsRequest)
        asked.append((request.after, job.token.role))
        after = [each for each in HAD if each.number > request.after]
        return IncidentsReply(tuple(after[:2]), more=len(after) > 2)

    monkeypatch.setattr(JobElsewhere, "ask", ask)
    first, second, third = asyncio.run(told())

    assert asked == [(0, Role.VIEWER), (2, Role.VIEWER)]
    assert (first.number, first.rung, first.nodes, first.stopped) == (1, "recover_in_place", ("node0",), False)
    assert first.text.startswith("Incident 1: RESUMED after 500 ms by recover_in_place, no steps lost; ")
    assert "rank 1 on node0" in first.text
    assert (second.rung, second.stopped, third.rung, third.stopped) == ("", False, "stop", True)


def test_a_controller_that_refuses_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobElsewhere, "ask", lambda *given: Refused("not in service"))

    with pytest.raises(MidstepError, match="demo: not in service"):
        asyncio.run(told())
