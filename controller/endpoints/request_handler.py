"""Handle an operator's request: answer at once, or make it an event and answer when that is durable and handled.

What takes long to answer is handed to who answers it later.
"""

from collections.abc import Callable
from typing import Protocol

from ...protocol.incidents import JobStatus
from ...protocol.messages import FaultReported
from ...protocol.types import ArmedFault, Assertion, FaultReport, JobSpec
from ..actions import Action, Send
from ..admission import unbelievable
from ..events import Event, InjectRequested, KillNodeRequested, StopRequested
from .abridging import Abridger, page
from .control_requests import (
    Accepted,
    IncidentsRequest,
    InjectRequest,
    KillNodeRequest,
    PauseFailoverRequest,
    PromoteRequest,
    PromptRequest,
    Refused,
    Reply,
    ReportFaultRequest,
    Request,
    StatusReply,
    StatusRequest,
    StoryRequest,
)


class LeadRequests(Protocol):
    """What answers requests about which controller leads."""

    def answer(self, request: PromoteRequest | PauseFailoverRequest) -> Reply:
        """Do what is asked, or say why not."""


class StoryRequests(Protocol):
    """What answers requests for the job's story."""

    def tell(self, request: StoryRequest, answer: Callable[[Reply], None]) -> None:
        """Answer later, or say at once why not."""


class RequestHandler:
    """Turns requests into events, and actions into answers."""

    def __init__(self, job: JobSpec, lead: LeadRequests, stories: StoryRequests | None = None) -> None:
        """`lead` answers what is about the lead, and not about the job; `stories`, if any, what the journal tells."""
        self._job = job
        self._lead = lead
        self._stories = stories
        self._abridger = Abridger()

    def begin(self, request: Request, status: Callable[[], JobStatus], answer: Callable[[Reply], None]) -> Event | None:
        """Answer now or later, where that takes no event; else return the event that the request is."""
        if isinstance(request, StoryRequest):
            self._tell(request, answer)
            return None
        begun = self._begun(request, status)
        if not isinstance(begun, Reply):
            return begun
        answer(begun)
        return None

    def _tell(self, request: StoryRequest, answer: Callable[[Reply], None]) -> None:
        if self._stories is None:
            answer(Refused("this controller cannot tell the story; read the journal where it lies"))
        else:
            self._stories.tell(request, answer)

    def _begun(self, request: PromptRequest, status: Callable[[], JobStatus]) -> Reply | Event:
        if isinstance(request, StatusRequest | IncidentsRequest):
            return self._told(request, status())
        if isinstance(request, PromoteRequest | PauseFailoverRequest):
            return self._lead.answer(request)
        if isinstance(request, InjectRequest):
            return self._without_rank(request.fault.rank) or InjectRequested(request.fault)
        if isinstance(request, KillNodeRequest):
            return _without_node(request.node, status()) or KillNodeRequested(request.node)
        if isinstance(request, ReportFaultRequest):
            report = request.report
            elsewhere = None if report.rank is not None else _without_node(report.node, status())
            return self.misfit(report) or elsewhere or FaultReported(report)
        return StopRequested(request.reason)

    def _told(self, request: StatusRequest | IncidentsRequest, status: JobStatus) -> Reply:
        if isinstance(request, StatusRequest):
            return StatusReply(self._abridger.abridged(status))
        return page(status.incidents, request.after)

    def misfit(self, report: FaultReport) -> Refused | None:
        """Say why a detector's report is not taken in, if it is not. It may be about nodes that no job has."""
        reason = unbelievable(report)
        if reason is not None:
            return Refused(f"the report is refused: {reason}")
        return None if report.rank is None else self._without_rank(report.rank)

    def _without_rank(self, rank: int) -> Refused | None:
        if 0 <= rank < self._job.world_size:
            return None
        return Refused(f"there is no rank {rank}: the job has ranks 0 to {self._job.world_size - 1}")

    @staticmethod
    def answer(event: Event, actions: list[Action]) -> Reply:
        """Return the answer to the request that became `event`, now that it is durable and handled."""
        receivers = ", ".join(dict.fromkeys(action.receiver for action in actions if isinstance(action, Send)))
        if isinstance(event, InjectRequested):
            if not receivers:
                return Refused(
                    f"rank {event.fault.rank} has no running process, so no fault was armed. Try again "
                    "when `midstep status` shows one"
                )
            return Accepted(f"{describe(event.fault)}; sent to {receivers}")
        if isinstance(event, KillNodeRequested):
            if not receivers:
                return Refused(
                    f"node {event.node} is not there, so it was not killed. See `midstep status` for the nodes"
                )
            return Accepted(
                f"node {event.node} is killed now, with its agent and all its processes; sent to {receivers}"
            )
        if isinstance(event, FaultReported):
            follows = f"sent to {receivers}" if receivers else "nothing has to be done at once, see `midstep status`"
            return Accepted(f"{describe_report(event.report)}; {follows}")
        return Accepted("the job is being stopped")


def _without_node(name: str | None, status: JobStatus) -> Refused | None:
    names = [node.node for node in status.nodes]
    if name in names:
        return None
    return Refused(f"there is no node {name!r}: the job has {', '.join(names) or 'none yet'}")


def describe(fault: ArmedFault) -> str:
    """Say in words what an armed fault will do."""
    when = "now" if fault.point is None and fault.step is None else ""
    if fault.point is not None:
        when = f"at {fault.point.value}"
    if fault.step is not None:
        when = f"{when} of step {fault.step}" if when else f"in step {fault.step}"
    return f"armed: {fault.action.value} rank {fault.rank} {when}"


def describe_report(report: FaultReport) -> str:
    """Say in words what a detector's report says."""
    code = f" {report.code}" if report.code else ""
    if report.rank is not None:
        where = f"rank {report.rank}"
    else:
        where = f"node {report.node}" if report.device is None else f"device {report.device} of node {report.node}"
    if report.assertion is Assertion.RECOVER:
        return f"noted: {report.kind}{code} of {where} has recovered"
    meaning = f" ({report.meaning})" if report.meaning else ""
    return f"noted: {report.level}{code}{meaning} of {where}"
