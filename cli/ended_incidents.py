"""The incidents of a job, as its controller tells them to other programs: page by page, and in a line each."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ..controller.endpoints.control_requests import IncidentsReply, IncidentsRequest, Refused, Request
from ..launch.reached_job import JobElsewhere
from ..platforms.base import EndedIncident, EndedIncidents
from ..protocol.errors import MidstepError
from ..protocol.identities import Role
from ..protocol.incidents import Incident, Outcome
from ..protocol.token import FullToken
from .views.causes import root_reports
from .views.report_text import outcome_line

ASK_S = 10.0

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


def asked(job: JobElsewhere, request: Request, kind: type[_Answer], limit_s: float = ASK_S) -> _Answer:
    """Ask a job's controller something, and return its answer of this kind. Raises MidstepError."""
    reply = job.ask(request, limit_s)
    if isinstance(reply, kind):
        return reply
    why = reply.reason if isinstance(reply, Refused) else "its controller gave another answer"
    raise MidstepError(f"{job.name}: {why}.")


def incidents_after(job: JobElsewhere, number: int) -> list[Incident]:
    """Return all incidents with higher numbers, also one that is open. Raises MidstepError."""
    incidents: list[Incident] = []
    more = True
    while more:
        page = asked(job, IncidentsRequest(incidents[-1].number if incidents else number), IncidentsReply)
        incidents.extend(page.incidents)
        more = page.more and bool(page.incidents)
    return incidents


def ended_incidents(job: str, controllers: Sequence[str], token: FullToken) -> EndedIncidents:
    """Return what tells a platform of the incidents of its job. It asks as a viewer, in a thread."""
    elsewhere = JobElsewhere(tuple(controllers), token.for_role(job, Role.VIEWER))

    async def after(number: int) -> tuple[EndedIncident, ...]:
        incidents = await asyncio.to_thread(incidents_after, elsewhere, number)
        return tuple(_in_a_line(each) for each in incidents if each.outcome is not Outcome.OPEN)

    return after


def _in_a_line(incident: Incident) -> EndedIncident:
    nodes = dict.fromkeys(report.node for report in root_reports(incident) if report.node)
    return EndedIncident(
        incident.number,
        "" if incident.rung is None else incident.rung.value,
        outcome_line(incident).plain,
        tuple(nodes),
        stopped=incident.outcome is Outcome.STOPPED,
    )
