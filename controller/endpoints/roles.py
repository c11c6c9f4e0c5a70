"""What each request of an operator takes: one table, so that nothing is open to a role by accident."""

import msgspec

from ...protocol.operators import Role
from .control_requests import (
    IncidentsRequest,
    InjectRequest,
    KillNodeRequest,
    PauseFailoverRequest,
    PromoteRequest,
    Refused,
    ReportFaultRequest,
    Request,
    StatusRequest,
    StopJobRequest,
    StoryRequest,
)


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
    PromoteRequest: Right(Role.ADMIN, "promote a controller"),
    PauseFailoverRequest: Right(Role.ADMIN, "pause the failover"),
}


def refusal_of(role: Role, request: Request) -> Refused | None:
    """Return why a role may not ask for this, with the role that may; None if it may."""
    right = RIGHTS[type(request)]
    if role.covers(right.role):
        return None
    return Refused(
        f"the role {role} may not {right.does}: that takes the role {right.role}. Whoever has the job's token makes a "
        f"token of that role: `midstep token --role {right.role}`"
    )
