"""The requests of operators, the answers of the controller, and the role that each request takes.

Closed, tagged structs: bytes that are none of these are refused. They come over the control socket, and from operators
on other machines, encrypted, at the controller's port.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from ...policies.schema import Policy
from ...protocol.bounds import Count, Name, Text
from ...protocol.controls import MOST_FAILOVER_S, Control, InjectFault, LeadControl, Why
from ...protocol.errors import MidstepError
from ...protocol.identities import Role
from ...protocol.incidents import ControllerPhase, Incident, JobStatus
from ...protocol.slow_records import SlowTold
from ...protocol.types import ArmedFault, FaultReport, detector_address

MOST_PAUSED_S = MOST_FAILOVER_S
INJECTOR = detector_address("inject")  # in whose name a fault is reported that nothing has seen


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for the status of the job."""


class IncidentsRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for incidents as they are, a page of them: those with higher numbers than `after`."""

    after: Count


class StoryRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask what led to what: of one incident, or of all that the journal still has. It is answered later."""

    incident: Count | None = None


class InjectRequest(msgspec.Struct, frozen=True, tag=True):
    """Cause a fault in a rank."""

    fault: ArmedFault


class KillNodeRequest(msgspec.Struct, frozen=True, tag=True):
    """Kill a node: agent and processes, at once."""

    node: Name


class ReportFaultRequest(msgspec.Struct, frozen=True, tag=True):
    """Take in a fault of a device or node, as if a detector had seen it."""

    report: FaultReport


class StopJobRequest(msgspec.Struct, frozen=True, tag=True):
    """End the job; asked again, without waiting for its last checkpoint."""

    reason: Text


class ControlRequest(msgspec.Struct, frozen=True, tag=True):
    """Have the job do something while it runs. `by`: who asks, as the command says; the connection says which role."""

    control: Control
    by: Name
    why: Why


class LeaveNodeRequest(msgspec.Struct, frozen=True, tag=True):
    """Leave a node: by a drain at a step boundary, or at once. It is not used again before it is released."""

    node: Name
    by: Name
    why: Why
    at_once: bool = False


class PolicyRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for the policy in force."""


class ApplyPolicyRequest(msgspec.Struct, frozen=True, tag=True):
    """Go by another policy from now on. `number`: of this change, so that no other one is undone unseen."""

    policy: Policy
    number: Count
    by: Name
    why: Why


class PromoteRequest(msgspec.Struct, frozen=True, tag=True):
    """Let another controller, which stands by, lead."""

    controller: Name


class PauseFailoverRequest(msgspec.Struct, frozen=True, tag=True):
    """Let no standby take over for so many seconds; 0: end the pause."""

    for_s: Annotated[int, msgspec.Meta(ge=0, le=MOST_PAUSED_S)]


class StatusReply(msgspec.Struct, frozen=True, tag=True):
    """The live answer to StatusRequest. `slow`: the nodes that were named slow so far."""

    status: JobStatus
    slow: SlowTold = SlowTold()


class PolicyReply(msgspec.Struct, frozen=True, tag=True):
    """The policy in force, after so many changes while the job ran."""

    policy: Policy
    changes: Count


class IncidentsReply(msgspec.Struct, frozen=True, tag=True):
    """A page of incidents, in order. `more`: there are later ones."""

    incidents: tuple[Incident, ...]
    more: bool


class StoryReply(msgspec.Struct, frozen=True, tag=True):
    """Events of the job in order, each with what followed from it in words. `first`: the earliest that is kept.

    `earlier_left_out`, `later_left_out`: how many of those that were asked for come before and after `told`, and were
    too many for one answer.
    """

    told: tuple[str, ...]
    first: Count = 1
    earlier_left_out: Count = 0
    later_left_out: Count = 0


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The request is durable and has been handled. `text`: what follows from it."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request changes nothing, and why."""

    reason: str


class TryLater(msgspec.Struct, frozen=True, tag=True):
    """The request changes nothing: `controller` stands by, or is about to lead, and cannot serve it now.

    `leader` leads, at `endpoint`; empty where that is not known.
    """

    controller: str
    phase: ControllerPhase
    leader: str = ""
    endpoint: str = ""

    @property
    def text(self) -> str:
        """Say what the controller is, and what to do."""
        told = f"controller {self.controller} is {self.phase}"
        if self.phase is ControllerPhase.LOADING:
            return f"{told} the journal: try again in some seconds"
        if not self.leader:
            return f"{told}, and no other one leads now: try again in some seconds"
        return f"{told}, and {self.leader} leads{f' at {self.endpoint}' if self.endpoint else ''}"


PromptRequest = (
    StatusRequest
    | IncidentsRequest
    | InjectRequest
    | KillNodeRequest
    | ReportFaultRequest
    | StopJobRequest
    | ControlRequest
    | LeaveNodeRequest
    | PolicyRequest
    | ApplyPolicyRequest
    | PromoteRequest
    | PauseFailoverRequest
)
"""A request that is answered at once, or when it is durable."""
Request = PromptRequest | StoryRequest
Reply = StatusReply | PolicyReply | IncidentsReply | StoryReply | Accepted | Refused | TryLater

_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def decode_reply(source: Path | str, data: bytes) -> Reply:
    """Return the answer in `data`. Raises MidstepError, which names its source, when it is not of this version."""
    try:
        reply: Reply = _decode_reply(data)
    except msgspec.MsgspecError as error:
        raise MidstepError(
            f"{source}: the controller's answer cannot be read: {error}. Use the midstep version that runs the job."
        ) from error
    return reply


class Right(msgspec.Struct, frozen=True):
    """The least role that a request takes, and what it does, in words."""

    role: Role
    does: str


RIGHTS: dict[type[Request], Right] = {
    StatusRequest: Right(Role.VIEWER, "see the status"),
    IncidentsRequest: Right(Role.VIEWER, "read the report"),
    StoryRequest: Right(Role.VIEWER, "read the story"),
    InjectRequest: Right(Role.OPERATOR, "inject a fault"),
    KillNodeRequest: Right(Role.OPERATOR, "kill a node"),
    ReportFaultRequest: Right(Role.OPERATOR, "report a fault"),
    StopJobRequest: Right(Role.OPERATOR, "stop the job"),
    ControlRequest: Right(Role.OPERATOR, "control the job"),
    LeaveNodeRequest: Right(Role.OPERATOR, "drain or isolate a node"),
    PolicyRequest: Right(Role.VIEWER, "see the policy"),
    ApplyPolicyRequest: Right(Role.OPERATOR, "change the policy"),
    PromoteRequest: Right(Role.ADMIN, "promote a controller"),
    PauseFailoverRequest: Right(Role.ADMIN, "pause the failover"),
}


def right_of(request: Request) -> Right:
    """Return what a request takes. A control of the lead takes more than the others."""
    leads = isinstance(request, ControlRequest) and isinstance(request.control, LeadControl)
    return Right(Role.ADMIN, "say which controller leads") if leads else RIGHTS[type(request)]


def is_injection(request: Request) -> bool:
    """Tell whether a request causes a fault on purpose, or reports one that is made up."""
    if isinstance(request, ControlRequest):
        return isinstance(request.control, InjectFault)
    if isinstance(request, ReportFaultRequest):
        return request.report.seen_by == INJECTOR
    return isinstance(request, InjectRequest | KillNodeRequest)


def refusal_of(role: Role, request: Request) -> Refused | None:
    """Return why a role may not ask for this, with the role that may; None if it may."""
    right = right_of(request)
    if role.covers(right.role):
        return None
    return Refused(
        f"the role {role} may not {right.does}: that takes the role {right.role}. Whoever has the job's token makes a "
        f"token of that role: `midstep token --role {right.role}`"
    )
