"""Admission of messages: the check between decoding a message and believing it.

The transport proves which agent or platform is at the other end of a connection. What comes through that connection is
still only believed where it is about its sender: an agent speaks of its own node and of the processes that it was
ordered to start, a rank of itself, over the connection of the node that its process was ordered to start on. A node
that was given back may only say what still runs there, so that it can be stopped. How big anything may be was checked
when the message was decoded (`protocol/bounds.py`).
"""

from ..policies.fault_codes import DETECTABLE
from ..protocol.enrolment import JOINING_FAMILY, EnrolmentRequested
from ..protocol.messages import (
    Ack,
    Envelope,
    FaultReported,
    NodeGoing,
    NodeLost,
    NodeRefused,
    NodeStaying,
    PlatformJoined,
)
from ..protocol.types import DETECTOR_PREFIX, PLATFORM, FaultLevel, FaultReport
from .node_admission import NODE_PREFIX, RANK_PREFIX, ranks_of, refusal_of_node, refusal_of_rank
from .routes import Routes

_OF_THE_PLATFORM = (PlatformJoined, NodeLost, NodeRefused, NodeGoing, NodeStaying, Ack)
_LONGEST_TEXT = 4000  # of a fault: the book adds to it


def refusal(identity: str, envelope: Envelope, world_size: int, routes: Routes) -> str | None:
    """Return why this message, arrived over the connection of `identity`, is not believed; None if it is.

    `routes`: what this controller, and those before it, have ordered to start where.
    """
    sender = envelope.sender
    out_of_range = _out_of_range(envelope, world_size)
    if out_of_range is not None:
        return out_of_range
    if sender.startswith(RANK_PREFIX):
        return refusal_of_rank(identity, envelope, world_size, routes)
    if sender != identity:
        return "sender is not the connection's owner"
    return _refusal_of_own_word(envelope, routes)


def _refusal_of_own_word(envelope: Envelope, routes: Routes) -> str | None:
    """Refuse what this sender may not say, over a connection that is its own."""
    sender = envelope.sender
    if sender.startswith(NODE_PREFIX):
        return refusal_of_node(envelope, routes.placement)
    if sender.startswith(JOINING_FAMILY):
        return _refusal_of_joining(envelope)
    if sender.startswith(DETECTOR_PREFIX):
        return _refusal_of_detector(envelope)
    return _refusal_of_platform(envelope)


def _out_of_range(envelope: Envelope, world_size: int) -> str | None:
    if not envelope.session:
        return "number out of range"
    body = envelope.body
    if isinstance(body, Ack):
        return None
    return None if all(rank < world_size for rank in ranks_of(body)) else "about no rank of this job"


def _refusal_of_joining(envelope: Envelope) -> str | None:
    if not isinstance(envelope.body, EnrolmentRequested):
        return "not for a joining node to say"
    return "numbered, and not to be acknowledged" if envelope.number else None


def _refusal_of_platform(envelope: Envelope) -> str | None:
    body = envelope.body
    if envelope.sender != PLATFORM:
        return "unknown kind of sender"
    if isinstance(body, FaultReported):
        return None if body.report.seen_by == PLATFORM else "speaks for another observer"
    return None if isinstance(body, _OF_THE_PLATFORM) else "not for a platform to say"


def _refusal_of_detector(envelope: Envelope) -> str | None:
    """Refuse what a detector may not report: it reports faults of hardware, under its own name."""
    body = envelope.body
    if isinstance(body, Ack):
        return None
    if not isinstance(body, FaultReported):
        return "not for a detector to say"
    if body.report.seen_by != envelope.sender:
        return "speaks for another detector"
    return unbelievable(body.report)


def unbelievable(report: FaultReport) -> str | None:
    """Return why a detector's report is not taken, whichever way it came; None if it is."""
    if report.kind not in DETECTABLE or report.mendable:
        return "not for a detector to see"
    if report.level is FaultLevel.SOFTWARE and report.code is None:
        return "names neither code nor level"
    return "longer than a fault can be" if len(report.detail + report.meaning) > _LONGEST_TEXT else None
