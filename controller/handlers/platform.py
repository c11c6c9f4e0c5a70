"""What the platform says of itself and of nodes that it is about to take away."""

from ...protocol.messages import CreateNode, NodeGoing, NodeStaying, PlatformJoined
from ...protocol.types import PLATFORM, Assertion, FaultKind, FaultLevel, FaultReport
from ..changes.drain import take_going
from ..changes.generation import nodes_needed, request_node
from ..changes.spares import refill
from ..recovery.hardware_faults import settle, sort_out
from ..recovery.state import JobState, Phase
from ..recovery.world import NodeState

NODE_GOING = "node_going"  # the code of the fault that a node has which is about to go


def on_platform_joined(state: JobState, event: PlatformJoined, now: float) -> None:
    """A platform is there: it is asked for the nodes that the job lacks, and that it does not have on their way."""
    state.arrivals.can_be_created, state.arrivals.can_be_killed = event.can_create, event.can_kill
    for name in event.nodes:
        if name not in state.world.nodes:
            state.world.add_node(name, NodeState.REQUESTED)
    for name in state.world.named(NodeState.REQUESTED):
        if name not in event.nodes:
            state.send(PLATFORM, CreateNode(name))
    if not event.can_create:
        return
    if state.phase is Phase.WAITING:
        _request_the_first(state)
    elif state.phase is Phase.RUNNING:
        refill(state, now)


def _request_the_first(state: JobState) -> None:
    spares = state.job.spare_nodes if state.arrivals.spares_awaited else 0
    have = state.world.named(NodeState.ACTIVE, NodeState.SPARE, NodeState.REQUESTED)
    for _ in range(nodes_needed(state) + spares - len(have)):
        request_node(state)


def on_node_going(state: JobState, event: NodeGoing, now: float) -> None:
    """A node will be taken away: it gets no new process, and its ranks move at a step boundary, if there is a place."""
    node = state.world.nodes.get(event.node)
    if node is None or node.state in {NodeState.LOST, NodeState.REQUESTED}:
        state.ignore("a node that is not there is going")
        return
    by = "" if event.within_s is None else f", within {event.within_s:g} s"
    report, news = state.book.enter(_report(state, event.node, f"{event.reason}{by}", now), now)
    if not news:
        state.ignore("going of a node that is known")
        return
    state.plans.going.add(event.node)
    settle(state, event.node)
    if state.world.on(event.node):
        take_going(state, report, now)
    elif state.phase is Phase.RUNNING:
        refill(state, now)


def on_node_staying(state: JobState, event: NodeStaying, now: float) -> None:
    """A node is not taken away after all: it is used again."""
    state.plans.going.discard(event.node)
    sort_out(state, _report(state, event.node, "it stays", now, Assertion.RECOVER), now)


def _report(state: JobState, node: str, detail: str, now: float, assertion: Assertion = Assertion.OCCUR) -> FaultReport:
    return FaultReport(
        kind=FaultKind.NODE,
        at_s=now,
        seen_by=PLATFORM,
        detail=detail,
        node=node,
        generation=state.generation,
        level=FaultLevel.SUB_HEALTH,
        code=NODE_GOING,
        assertion=assertion,
    )
