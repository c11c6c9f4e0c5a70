"""Admission of messages: the check between decoding a message and believing it.

The transport proves which agent or platform is at the other end of a connection. What comes through that connection is
still only believed where it is about its sender: an agent speaks of its own node and of the processes that it was
ordered to start. What ranks say of themselves comes in a report of their node, and is believed word by word where their
process was ordered to start there. A node that was given back may only say what still runs there, so that it can be
stopped. Which node has which process follows from what was ordered (`routes.py`), never from what a node says of
itself. How big anything may be was checked when the message was decoded (`protocol/bounds.py`).
"""

from collections.abc import Sequence

from ..policies.fault_codes import DETECTABLE
from ..protocol import messages as m
from ..protocol.bounds import MOST_OF_NODES_WORDS
from ..protocol.rank_logs import size_of
from ..protocol.types import DETECTOR_PREFIX, OPERATOR, PLATFORM, FaultLevel, FaultReport, node_address, rank_address
from .routes import PlacementHistory, Routes

_OF_THE_PLATFORM = (m.PlatformJoined, m.NodeLost, m.NodeRefused, m.NodeGoing, m.NodeStaying, m.Ack)
_LONGEST_TEXT = 4000  # of a fault: the book adds to it


def refusal(identity: str, envelope: m.Envelope, world_size: int, routes: Routes) -> str | None:
    """Return why this message, arrived over the connection of `identity`, is not believed; None if it is.

    `routes`: what this controller, and those before it, have ordered to start where.
    """
    sender = envelope.sender
    out_of_range = _out_of_range(envelope, world_size)
    if out_of_range is not None:
        return out_of_range
    if sender != identity:
        return "sender is not the connection's owner"
    return _refusal_of_own_word(envelope, routes)


def _refusal_of_own_word(envelope: m.Envelope, routes: Routes) -> str | None:
    """Refuse what this sender may not say, over a connection that is its own."""
    sender = envelope.sender
    if sender.startswith(NODE_PREFIX):
        return refusal_of_node(envelope, routes.placement)
    if sender.startswith(m.JOINING_FAMILY):
        return _refusal_of_joining(envelope)
    if sender.startswith(DETECTOR_PREFIX):
        return _refusal_of_detector(envelope)
    return _refusal_of_platform(envelope)


def _out_of_range(envelope: m.Envelope, world_size: int) -> str | None:
    if not envelope.session:
        return "number out of range"
    body = envelope.body
    if isinstance(body, _OF_ORDERED_PROCESSES):
        return None
    return None if all(rank < world_size for rank in ranks_of(body)) else "about no rank of this job"


def _refusal_of_joining(envelope: m.Envelope) -> str | None:
    if not isinstance(envelope.body, m.EnrolmentRequested):
        return "not for a joining node to say"
    return "numbered, and not to be acknowledged" if envelope.number else None


def _refusal_of_platform(envelope: m.Envelope) -> str | None:
    body = envelope.body
    if envelope.sender != PLATFORM:
        return "unknown kind of sender"
    if isinstance(body, m.FaultReported):
        return None if body.report.seen_by == PLATFORM else "speaks for another observer"
    return None if isinstance(body, _OF_THE_PLATFORM) else "not for a platform to say"


def _refusal_of_detector(envelope: m.Envelope) -> str | None:
    """Refuse what a detector may not report: it reports faults of hardware, under its own name."""
    body = envelope.body
    if isinstance(body, m.Ack):
        return None
    if not isinstance(body, m.FaultReported):
        return "not for a detector to say"
    if body.report.seen_by != envelope.sender:
        return "speaks for another detector"
    return unbelievable(body.report)


def unbelievable(report: FaultReport) -> str | None:
    """Return why a detector's report is not taken, whichever way it came; None if it is."""
    if report.kind not in DETECTABLE or report.mendable:
        return "not for a detector to see"
    if report.seen_by == OPERATOR:
        return "speaks for an operator"
    if report.level is FaultLevel.SOFTWARE and report.code is None:
        return "names neither code nor level"
    return "longer than a fault can be" if len(report.detail + report.meaning) > _LONGEST_TEXT else None


NODE_PREFIX = node_address("")
_BY_A_NODE = (
    m.NodeHeartbeat,  # most of what arrives
    m.RanksReported,
    m.NodeJoined,
    m.NodeChecked,
    m.NodeGoing,  # of itself, when it is asked to leave
    m.NodeLost,  # of itself, when it leaves
    m.StoreMoved,
    m.ProcessesPrepared,
    m.ProcessesStarted,
    m.NewcomerWaiting,
    m.ProcessExited,
    m.ProgressReported,
    m.NodeWords,
    m.FaultReported,
)
_WithoutIncarnation = m.CheckpointSaved | m.ActionEnded
_OfARank = m.RankJoined | m.RankQuiesced | m.RankReady | m.StepCommitted | m.RankFinished | _WithoutIncarnation
_WITH_REPORT = (m.RankJoined, m.RankQuiesced)
_OF_A_PROCESS = (m.NewcomerWaiting, m.ProcessExited)
_WITH_CLOCKS = (m.NodeHeartbeat, m.ProgressReported)
# They are looked at process by process, and one that no controller has ordered to start is refused there.
_OF_ORDERED_PROCESSES = (*_WITH_CLOCKS, m.RanksReported, m.Ack)


def refusal_of_node(envelope: m.Envelope, placement: PlacementHistory) -> str | None:
    """Return why an agent's own message is not believed; None if it is."""
    body, address = envelope.body, envelope.sender
    if isinstance(body, m.Ack):
        return None
    if not isinstance(body, _BY_A_NODE):
        return "not for an agent to say"
    if placement.is_given_back(address) and not isinstance(body, m.NodeJoined | m.ProcessesStarted):
        return "node was given back"
    if isinstance(body, m.FaultReported):
        return _refusal_of_report(body.report, address, placement)
    nodes = (each.node for each in body.started) if isinstance(body, m.ProcessesStarted) else ()
    if any(node_address(node) != address for node in (body.node, *nodes)):
        return "about another node"
    return _refusal_of_processes(body, address, placement)


def believed_of(
    body: m.RanksReported, identity: str, world_size: int, placement: PlacementHistory
) -> tuple[m.RanksReported | None, list[str]]:
    """Return what is believed of what a node says of its ranks (None: nothing), and why each of the others is not."""
    refusals = [refusal_of_rank(report, identity, world_size, placement) for report in body.reports]
    refused = [reason for reason in refusals if reason is not None]
    if not refused:
        return body, refused
    kept = tuple(report for report, reason in zip(body.reports, refusals, strict=True) if reason is None)
    return m.RanksReported(body.node, kept) if kept else None, refused


def refusal_of_rank(report: m.RankReport, identity: str, world_size: int, placement: PlacementHistory) -> str | None:
    """Return why a report of a rank, which came in one of its node, is not believed; None if it is."""
    rank, word = report.rank, report.word
    if rank >= world_size:
        return "no such rank"
    if placement.node_of(rank, report.incarnation) != identity:
        return "reported by an agent that does not have the rank"
    if isinstance(word, m.FaultReported):
        return _refusal_of_own_report(word.report, report, identity, world_size)
    copies = word.report.local_states if isinstance(word, _WITH_REPORT) else ()
    if word.rank >= world_size or any(copy.rank >= world_size for copy in copies):
        return "about no rank of this job"
    return _refusal_of_ranks_word(word, report, identity, placement)


def _refusal_of_ranks_word(
    word: _OfARank, said: m.RankReport, identity: str, placement: PlacementHistory
) -> str | None:
    if word.rank != said.rank:
        return "about another rank"
    # Another incarnation of the rank on this node is for the machine to judge: it knows which one is the present one.
    if isinstance(word, _WithoutIncarnation) or word.incarnation == said.incarnation:
        return None
    return None if placement.node_of(said.rank, word.incarnation) == identity else "about a process of another node"


def ranks_of(body: m.Message) -> Sequence[int]:
    """Return the ranks that a message speaks of: what comes from the wire must not index past the world."""
    if isinstance(body, m.FaultReported):
        return () if body.report.rank is None else (body.report.rank,)
    return [rank for rank, _ in _processes_of(body)]


def _refusal_of_report(report: FaultReport, address: str, placement: PlacementHistory) -> str | None:
    """Refuse what an agent may not report: it reports ranks, starts and devices of its own node."""
    if report.seen_by != address:
        return "speaks for another observer"
    if report.node is None or node_address(report.node) != address:
        return "about another node"
    if report.rank is None:
        return None
    if report.incarnation:
        known = placement.node_of(report.rank, report.incarnation) == address
    else:  # a device on which some process of the rank was
        known = placement.has_hosted(report.rank, address)
    return None if known else "about a process of another node"


def _refusal_of_processes(body: m.Message, address: str, placement: PlacementHistory) -> str | None:
    if isinstance(body, _WITH_CLOCKS):  # most of what arrives: looked at where they are
        known = placement.has_all(body.ranks, address)
        told = body.reported if isinstance(body, m.NodeHeartbeat) else None
        known = known and (told is None or placement.node_of(told.rank, told.incarnation) == address)
    elif isinstance(body, m.NodeWords) and size_of(body) > MOST_OF_NODES_WORDS:
        return "longer than last words may be"
    else:
        node_of = placement.node_of
        known = all(node_of(rank, incarnation) == address for rank, incarnation in _processes_of(body))
    return None if known else "about a process of another node"


def _refusal_of_own_report(report: FaultReport, said: m.RankReport, identity: str, world_size: int) -> str | None:
    """Refuse what a process may not report: it reports only its own faults."""
    if report.rank is not None and report.rank >= world_size:
        return "about no rank of this job"
    if report.seen_by != rank_address(said.rank):
        return "speaks for another observer"
    if report.node is not None and node_address(report.node) != identity:
        return "about another node"
    return None if (report.rank, report.incarnation) == (said.rank, said.incarnation) else "about another rank"


def _processes_of(body: m.Message) -> Sequence[tuple[int, int]]:
    """Return rank and incarnation of the processes that an agent speaks of."""
    if isinstance(body, m.NodeWords):
        return [(words.rank, words.incarnation) for words in body.ranks]
    if isinstance(body, m.NodeJoined):
        return [(process.rank, process.incarnation) for process in body.processes]
    if isinstance(body, m.ProcessesStarted):
        return [(each.process.rank, each.process.incarnation) for each in body.started]
    if not isinstance(body, _OF_A_PROCESS):
        return ()
    process = (body.process.rank, body.process.incarnation)
    if isinstance(body, m.ProcessExited) and body.last is not None:
        return (process, (body.last.rank, body.last.incarnation))
    return (process,)
