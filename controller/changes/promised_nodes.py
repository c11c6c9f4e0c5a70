"""Ranks whose node was left when no spare one was there: they start on the first that comes, the others are parked.

Until then they stay in the books of the node that was left. The platform is asked for nodes as part of the rung.
"""

from ...protocol.types import node_address
from ..recovery.state import JobState
from ..recovery.world import NodeState
from .generation import nodes_needed, request_missing, start_command

MAX_LOST = 10  # nodes, on their way to the same ranks; then they are not asked for again


def has_come(state: JobState) -> bool:
    """Whether a node is there for ranks that wait for one."""
    return bool(state.due.unplaced) and bool(state.world.named(NodeState.SPARE))


def place(state: JobState, now: float) -> None:
    """A node has come: the ranks of one that was left start there."""
    old = state.world.holders[min(state.due.unplaced)].node
    new = state.world.spares()[0]
    state.world.move(old, new)
    for holder in state.world.on(new):
        if holder.rank in state.due.unplaced:
            state.due.unplaced.discard(holder.rank)
            state.send(node_address(new), start_command(state, holder))
    state.arrivals.lost = 0
    state.due.newcomers_s = now + state.policy.deadlines.start_s


def ask_again(state: JobState) -> bool:
    """A node that was promised is gone: ask for another, some times; say whether all that are waited for can come."""
    state.arrivals.lost += 1
    if state.arrivals.lost <= MAX_LOST:
        request_missing(state)
    return enough_promised(state)


def enough_promised(state: JobState) -> bool:
    """Whether as many nodes are promised as ranks wait for."""
    promised = state.world.named(NodeState.ACTIVE, NodeState.SPARE, NodeState.REQUESTED)
    return len(promised) >= nodes_needed(state)


def give_up_waiting(state: JobState) -> None:
    """Count on no promised node any more; one that comes all the same is welcome."""
    for name in state.world.named(NodeState.REQUESTED):
        state.world.nodes[name].state = NodeState.LOST
