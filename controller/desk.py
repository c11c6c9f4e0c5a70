"""What becomes of an operator's request: an answer at once, or an event and then an answer about its consequences."""

from collections.abc import Callable

from ..protocol.incidents import JobStatus
from ..protocol.types import ArmedFault, JobSpec
from .actions import Action, Send
from .control_requests import (
    Accepted,
    InjectRequest,
    KillNodeRequest,
    Refused,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
)
from .events import Event, InjectRequested, KillNodeRequested, StopRequested


class Desk:
    """Turns requests into events, and actions into answers."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job

    def open(self, request: Request, status: Callable[[], JobStatus]) -> Reply | Event:
        """Return the answer where there is one already, else the event that the request is."""
        if isinstance(request, StatusRequest):
            return StatusReply(status())
        if isinstance(request, InjectRequest):
            if not 0 <= request.fault.rank < self._job.world_size:
                return Refused(
                    f"there is no rank {request.fault.rank}: the job has ranks 0 to {self._job.world_size - 1}"
                )
            return InjectRequested(request.fault)
        if isinstance(request, KillNodeRequest):
            names = [node.node for node in status().nodes]
            if request.node not in names:
                return Refused(f"there is no node {request.node!r}: the job has {', '.join(names) or 'none yet'}")
            return KillNodeRequested(request.node)
        return StopRequested(request.reason)

    @staticmethod
    def close(event: Event, actions: list[Action]) -> Reply:
        """Return the answer to the request that became `event`, now that it is durable and handled."""
        receivers = ", ".join(dict.fromkeys(action.receiver for action in actions if isinstance(action, Send)))
        if isinstance(event, InjectRequested):
            if not receivers:
                return Refused(f"rank {event.fault.rank} has no process that could be harmed now; nothing was armed")
            return Accepted(f"{describe(event.fault)}; sent to {receivers}")
        if isinstance(event, KillNodeRequested):
            if not receivers:
                return Refused(f"node {event.node} is not there to be killed; nothing was done")
            return Accepted(
                f"node {event.node} is to die now, with its agent and all its processes; sent to {receivers}"
            )
        return Accepted("the job is being stopped")


def describe(fault: ArmedFault) -> str:
    """Say in words what an armed fault will do."""
    when = "now" if fault.moment is None and fault.step is None else ""
    if fault.moment is not None:
        when = f"at {fault.moment.value}"
    if fault.step is not None:
        when = f"{when} of step {fault.step}" if when else f"in step {fault.step}"
    return f"armed: {fault.injury.value} rank {fault.rank} {when}"
