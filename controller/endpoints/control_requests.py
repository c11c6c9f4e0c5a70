"""What an operator's command line may ask of the controller, and what it may answer.

Closed, tagged structs: bytes that are none of these are refused. They never leave the machine of the controller.
"""

import msgspec

from ...protocol.bounds import Name, Text
from ...protocol.incidents import JobStatus
from ...protocol.types import ArmedFault, FaultReport


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for the status of the job."""


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


class StatusReply(msgspec.Struct, frozen=True, tag=True):
    """The live answer to StatusRequest."""

    status: JobStatus


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The request is durable and has been handled. `text`: what follows from it."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request changes nothing, and why."""

    reason: str


Request = StatusRequest | InjectRequest | KillNodeRequest | ReportFaultRequest | StopJobRequest
Reply = StatusReply | Accepted | Refused
