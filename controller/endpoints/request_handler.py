"""Handle an operator's request: answer at once, or make it an event and answer when that is durable and handled.

What takes long to answer is handed on. A status is kept small enough for one answer (`Abridger`), however long a job's
history is and however many ranks it has. What an operator looks at first stays whole: ranks, nodes, budgets, the latest
incident. Of the incidents before it goes first what each rank did, then the earliest incidents themselves; of the
standing faults, the oldest. How many were left out is said. The journal keeps all of it.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import islice
from typing import Protocol

import msgspec

from ...policies.rules import broken_rules
from ...policies.schema import Policy
from ...protocol.controls import Asked, Control, PauseFailover, PromoteController
from ...protocol.incidents import Incident, JobStatus, StandingFault
from ...protocol.messages import FaultReported
from ...protocol.slow_records import SlowTold
from ...protocol.types import OPERATOR, ArmedFault, Assertion, FaultKind, FaultLevel, FaultReport, JobSpec
from ..admission import unbelievable
from ..journaled import Journaled
from ..recovery.events import (
    Action,
    ControlAnswered,
    ControlRequested,
    Event,
    InjectRequested,
    KillNodeRequested,
    PolicyApplied,
    Send,
    StopRequested,
)
from .control_requests import (
    Accepted,
    ApplyPolicyRequest,
    ControlRequest,
    IncidentsReply,
    IncidentsRequest,
    InjectRequest,
    KillNodeRequest,
    LeaveNodeRequest,
    PauseFailoverRequest,
    PolicyReply,
    PolicyRequest,
    PromoteRequest,
    PromptRequest,
    Refused,
    Reply,
    ReportFaultRequest,
    Request,
    StatusReply,
    StatusRequest,
    StopJobRequest,
    StoryRequest,
    is_injection,
)

NO_INJECTION = (
    "the policy of this job allows no faults on purpose (allow_inject: false), and that cannot change while it runs. "
    "Try it on a job whose policy allows it"
)


class LeadRequests(Protocol):
    """The part of a controller that answers requests about the lead."""

    def answer(self, request: PromoteRequest | PauseFailoverRequest) -> Reply:
        """Do what is asked, or say why not."""


class StoryRequests(Protocol):
    """The part of a controller that answers requests for the job's story."""

    def tell(self, request: StoryRequest, answer: Callable[[Reply], None]) -> None:
        """Answer later, or say at once why not."""


class RequestHandler:
    """Turns requests into events, and actions into answers."""

    def __init__(
        self,
        job: JobSpec,
        lead: LeadRequests,
        stories: StoryRequests | None = None,
        policy: Callable[[], Policy] = Policy,
        slow: Callable[[], SlowTold] = SlowTold,
    ) -> None:
        """`lead` answers what is about the lead, and not about the job; `stories`, if any, what the journal tells.

        `policy` returns the policy in force, and `slow` the nodes that were named slow.
        """
        self._policy, self._slow = policy, slow
        self._job = job
        self._lead = lead
        self._stories = stories
        self._abridger = Abridger()

    def begin(
        self, request: Request, role: str, status: Callable[[], JobStatus], answer: Callable[[Reply], None]
    ) -> Event | None:
        """Answer now or later, where that takes no event; else return the event that the request is.

        `role`: that of the operator who asks.
        """
        if isinstance(request, StoryRequest):
            self._tell(request, answer)
            return None
        forbidden = is_injection(request) and not self._policy().allow_inject
        begun = Refused(NO_INJECTION) if forbidden else self._begun(request, role, status)
        if not isinstance(begun, Reply):
            return begun
        answer(begun)
        return None

    def _tell(self, request: StoryRequest, answer: Callable[[Reply], None]) -> None:
        if self._stories is None:
            answer(Refused("this controller cannot tell the story; read the journal where it lies"))
        else:
            self._stories.tell(request, answer)

    def _begun(self, request: PromptRequest, role: str, status: Callable[[], JobStatus]) -> Reply | Event:
        if isinstance(request, StatusRequest | IncidentsRequest):
            return self._told(request, status())
        if isinstance(request, PromoteRequest | PauseFailoverRequest):
            return self._lead.answer(request)
        if isinstance(request, PolicyRequest):
            return PolicyReply(self._policy(), status().policy_changes)
        if isinstance(request, ControlRequest | ApplyPolicyRequest):
            return _control(request, role)
        if isinstance(request, LeaveNodeRequest):
            return _without_node(request.node, status()) or FaultReported(_leaving(request, role))
        return StopRequested(request.reason) if isinstance(request, StopJobRequest) else self._fault(request, status)

    def _fault(
        self, request: InjectRequest | KillNodeRequest | ReportFaultRequest, status: Callable[[], JobStatus]
    ) -> Reply | Event:
        if isinstance(request, InjectRequest):
            return self._without_rank(request.fault.rank) or InjectRequested(request.fault)
        if isinstance(request, KillNodeRequest):
            return _without_node(request.node, status()) or KillNodeRequested(request.node)
        report = request.report
        elsewhere = None if report.rank is not None else _without_node(report.node, status())
        return self.misfit(report) or elsewhere or FaultReported(report)

    def _told(self, request: StatusRequest | IncidentsRequest, status: JobStatus) -> Reply:
        if isinstance(request, StatusRequest):
            return StatusReply(self._abridger.abridged(status), self._slow())
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

    def answer(self, event: Journaled, actions: list[Action]) -> Reply:
        """Return the answer to the request that became `event`, now that it is durable and handled."""
        if isinstance(event, ControlRequested | PolicyApplied):
            told = [action for action in actions if isinstance(action, ControlAnswered)]
            return self._answer_of_control(event.control if isinstance(event, ControlRequested) else None, told)
        return _answer_of_order(event, actions)

    def _answer_of_control(self, control: Control | None, told: list[ControlAnswered]) -> Reply:
        if not told:
            return Refused("the job has ended")
        if isinstance(control, PromoteController):
            return self._lead.answer(PromoteRequest(control.controller))
        if isinstance(control, PauseFailover):
            return self._lead.answer(PauseFailoverRequest(control.for_s))
        return Refused(told[0].text) if told[0].refused else Accepted(told[0].text)


def _answer_of_order(event: Journaled, actions: list[Action]) -> Reply:
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
            return Refused(f"node {event.node} is not there, so it was not killed. See `midstep status` for the nodes")
        return Accepted(f"node {event.node} is killed now, with its agent and all its processes; sent to {receivers}")
    if isinstance(event, FaultReported):
        follows = f"sent to {receivers}" if receivers else "nothing has to be done at once, see `midstep status`"
        return Accepted(f"{describe_report(event.report)}; {follows}")
    return Accepted("the job is being stopped")


def _control(request: ControlRequest | ApplyPolicyRequest, role: str) -> Reply | Event:
    asked = Asked(request.by, role, request.why)
    if isinstance(request, ControlRequest):
        return ControlRequested(request.control, asked)
    wrong = broken_rules(request.policy)
    if wrong:
        return Refused(f"that is no policy: {'; '.join(f'{each.key}: {each.text}' for each in wrong)}")
    return PolicyApplied(request.policy, request.number, asked)


def _leaving(request: LeaveNodeRequest, role: str) -> FaultReport:
    """Return the report by which a node is left: a standing fault, in the name of the operator."""
    return FaultReport(
        FaultKind.NODE,
        0.0,
        OPERATOR,
        Asked(request.by, role, request.why).text,
        node=request.node,
        level=FaultLevel.NODE if request.at_once else FaultLevel.SUB_HEALTH,
        fault_id=f"{'isolate' if request.at_once else 'drain'} {request.node}",
        assertion=Assertion.OCCUR,
    )


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


MOST_BYTES = 6 * 1024 * 1024  # less than an answer may have, since sizes are estimated
PAGE_BYTES = 1024 * 1024  # of incidents: what is encoded at once
_FAULT_SHARE = 8  # faults get this part of it
_MOST_NAMED = 64  # reports, decisions or ranks of one abridged incident

# In msgpack, generously: what is measured this way costs nothing, while encoding a long history takes seconds.
_EACH_BYTES = 400
_RANK_PHASE_BYTES = 56
_PID_BYTES = 12
_RANK_BYTES = 6
_RANK_STATUS_BYTES = 130
_NODE_STATUS_BYTES = 200


def page(incidents: tuple[Incident, ...], after: int) -> IncidentsReply:
    """Return the incidents that come after a number, about so many as fit a page. One that fits no answer is short."""
    begin = bisect_right(incidents, after, key=lambda incident: incident.number)
    room, end = PAGE_BYTES, begin
    while end < len(incidents) and (room > 0 or end == begin):
        room -= _size_of(incidents[end])
        end += 1
    told = incidents[begin:end]
    if room < PAGE_BYTES - MOST_BYTES:  # only the last one of a page can be as large as that
        told = (*told[:-1], _short(told[-1]))
    return IncidentsReply(told, end < len(incidents))


class Abridger:
    """Makes the short forms of incidents, once each: an incident that is over does not change any more."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._short: dict[int, tuple[Incident, Incident]] = {}  # by number: as it is, and its short form

    def abridged(self, status: JobStatus) -> JobStatus:
        """Return the status as it is if it has at most so many bytes, else with less of its history."""
        faults = _latest_faults(status.faults, self._most_bytes // _FAULT_SHARE)
        room = self._most_bytes - sum(map(_size_of_fault, faults))
        room -= _RANK_STATUS_BYTES * len(status.ranks) + _NODE_STATUS_BYTES * len(status.nodes)
        incidents = self._latest_incidents(status.incidents, room)
        return msgspec.structs.replace(
            status,
            faults=faults,
            faults_left_out=len(status.faults) - len(faults),
            incidents=incidents,
            incidents_left_out=len(status.incidents) - len(incidents),
        )

    def _latest_incidents(self, incidents: tuple[Incident, ...], room: int) -> tuple[Incident, ...]:
        if sum(map(_size_of, incidents)) <= room:
            return incidents
        kept: list[Incident] = []
        whole = room * 3 // 4
        for incident in reversed(incidents):
            whole -= _size_of(incident)  # once there is no room for a whole one, the earlier ones are short, too
            told = incident if whole >= 0 else self._short_form(incident)
            room -= _size_of(told)
            if room < 0:
                break
            kept.append(told)
        return tuple(reversed(kept))

    def _short_form(self, incident: Incident) -> Incident:
        known = self._short.get(incident.number)
        if known is None or known[0] is not incident:
            known = self._short[incident.number] = (incident, _short(incident))
        return known[1]


def _latest_faults(faults: tuple[StandingFault, ...], room: int) -> tuple[StandingFault, ...]:
    kept: list[StandingFault] = []
    for fault in reversed(faults):
        room -= _size_of_fault(fault)
        if room < 0:
            break
        kept.append(fault)
    return tuple(reversed(kept))


def _short(incident: Incident) -> Incident:
    """Return an incident without what each rank did. Which healthy process was not kept, if any, is still seen."""
    short = incident.without_ranks()
    return msgspec.structs.replace(
        short,
        reports=incident.reports[:_MOST_NAMED],
        decisions=incident.decisions[-_MOST_NAMED:],
        phases=incident.phases[-_MOST_NAMED:],
        generations=incident.generations[-_MOST_NAMED:],
        replaced=incident.replaced[:_MOST_NAMED],
        pids_before=dict(islice(short.pids_before.items(), _MOST_NAMED)),
        pids_after=dict(islice(short.pids_after.items(), _MOST_NAMED)),
        repair_reasons=incident.repair_reasons[:_MOST_NAMED],
    )


def _size_of(incident: Incident) -> int:
    size = _EACH_BYTES + _RANK_PHASE_BYTES * len(incident.rank_phases) + _RANK_BYTES * len(incident.replaced)
    size += _PID_BYTES * (len(incident.pids_before) + len(incident.pids_after))
    size += sum(map(_size_of_report, incident.reports)) + sum(map(len, incident.repair_reasons))
    skipped = (skipped for decision in incident.decisions for skipped in decision.skipped)
    size += sum(_EACH_BYTES + len(decision.reason) for decision in incident.decisions)
    size += sum(_RANK_PHASE_BYTES + len(each.reason) for each in skipped)
    return size + _RANK_PHASE_BYTES * len(incident.phases) + len(incident.ended_reason)


def _size_of_fault(fault: StandingFault) -> int:
    return _size_of_report(fault.report)


def _size_of_report(report: FaultReport) -> int:
    texts = (report.detail, report.meaning, report.output)
    names = (*texts, report.seen_by, report.node or "", report.code or "", report.fault_id)
    return _EACH_BYTES + sum(map(len, names))
