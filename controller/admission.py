"""Who may say what to the controller: the check between decoding a message and believing it.

The transport proves which agent or platform is at the other end of a connection. What comes through that connection is
still only believed where it is about its sender: an agent speaks of its own node, a rank of itself.
"""

from collections.abc import Iterator

from ..policies.fault_codes import DETECTABLE
from ..protocol.messages import (
    Ack,
    CheckpointSaved,
    Envelope,
    FaultReported,
    Message,
    NewcomerWaiting,
    NodeHeartbeat,
    NodeJoined,
    NodeLost,
    NodeRefused,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    StepCommitted,
    StoreMoved,
)
from ..protocol.types import DETECTOR_PREFIX, PLATFORM, FaultLevel, FaultReport, node_address, rank_address

_OF_A_NODE = (
    NodeJoined,
    NodeLost,  # of itself, when it leaves
    StoreMoved,
    ProcessStarted,
    NewcomerWaiting,
    ProcessExited,
    ProgressReported,
    NodeHeartbeat,
)
_OF_A_RANK = (RankJoined, RankQuiesced, RankReady, StepCommitted, RankFinished, CheckpointSaved)
_OF_THE_PLATFORM = (NodeLost, NodeRefused)
_OF_ANYBODY = (FaultReported, Ack)
_NODE_PREFIX = node_address("")
_RANK_PREFIX = "rank/"
_LARGEST_NUMBER = 2**63 - 1  # what the journal can hold
_DIGITS = 9  # of a rank
_LONGEST_NAME = 512  # of a node, a code, a fault: what the fault book keeps
_LONGEST_TEXT = 10_000
_LATEST_S = 1e12  # of any clock: seconds, not milliseconds, and no NaN


def refusal(identity: str, envelope: Envelope, world_size: int) -> str | None:
    """Return why this message, arrived over the connection of `identity`, is not believed; None if it is."""
    sender = envelope.sender
    out_of_range = _out_of_range(envelope, world_size)
    if out_of_range is not None:
        return out_of_range
    if sender.startswith(_RANK_PREFIX):
        return _refusal_of_rank(identity, envelope, world_size)
    if sender != identity:
        return "sender is not the connection's owner"
    if sender.startswith(_NODE_PREFIX):
        return _refusal_of_node(envelope)
    if sender.startswith(DETECTOR_PREFIX):
        return _refusal_of_detector(envelope)
    return _refusal_of_platform(envelope)


def _out_of_range(envelope: Envelope, world_size: int) -> str | None:
    if not (0 <= envelope.number <= _LARGEST_NUMBER and 0 < envelope.session <= _LARGEST_NUMBER):
        return "number out of range"
    if not all(0 <= rank < world_size for rank in _ranks_of(envelope.body)):
        return "about no rank of this job"
    return None


def _refusal_of_platform(envelope: Envelope) -> str | None:
    if envelope.sender != PLATFORM:
        return "unknown kind of sender"
    return None if isinstance(envelope.body, _OF_THE_PLATFORM + _OF_ANYBODY) else "not for a platform to say"


def _refusal_of_node(envelope: Envelope) -> str | None:
    body = envelope.body
    if isinstance(body, _OF_ANYBODY):
        return None
    if not isinstance(body, _OF_A_NODE):
        return "not for an agent to say"
    return None if node_address(body.node) == envelope.sender else "about another node"


def _refusal_of_detector(envelope: Envelope) -> str | None:
    """A detector speaks of hardware, in its own name, and of nothing else."""
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
    names = (report.seen_by, report.node or "", report.code or "", report.fault_id)
    if any(len(name) > _LONGEST_NAME for name in names) or len(report.detail + report.meaning) > _LONGEST_TEXT:
        return "longer than a fault can be"
    if report.device is not None and not 0 <= report.device <= _LARGEST_NUMBER:
        return "about no device"
    timely = 0 <= report.at_s < _LATEST_S and 0 <= report.age_s < _LATEST_S
    return None if timely else "seen at no time"


def _ranks_of(body: Message) -> Iterator[int]:
    """Yield the ranks that a message speaks of: what comes from the wire must not index past the world."""
    if isinstance(body, _OF_A_RANK):
        yield body.rank
        if isinstance(body, RankJoined | RankQuiesced):
            yield from (copy.rank for copy in body.report.own_states)
    elif isinstance(body, ProcessStarted | NewcomerWaiting | ProcessExited):
        yield body.process.rank
    elif isinstance(body, NodeJoined):
        yield from (process.rank for process in body.processes)
    elif isinstance(body, NodeHeartbeat | ProgressReported):
        yield from (progress.rank for progress in body.ranks)
    elif isinstance(body, FaultReported) and body.report.rank is not None:
        yield body.report.rank


def _refusal_of_rank(identity: str, envelope: Envelope, world_size: int) -> str | None:
    """Any agent may relay any rank: the machine knows by the incarnation whether it is the living one."""
    body, name = envelope.body, envelope.sender.removeprefix(_RANK_PREFIX)
    rank = int(name) if name.isascii() and name.isdigit() and len(name) <= _DIGITS else world_size
    if rank >= world_size or envelope.sender != rank_address(rank):
        return "no such rank"
    if not identity.startswith(_NODE_PREFIX):
        return "relayed by no agent"
    if isinstance(body, _OF_ANYBODY):
        return None
    if not isinstance(body, _OF_A_RANK):
        return "not for a rank to say"
    return None if body.rank == rank else "about another rank"
