"""Spares: those that were used or lost are asked for again, and what they build ahead of a fault.

A platform that has none now is asked again later, less and less often, and in the end not any more: a job trains on
without spares as well. Whatever node comes makes it worth asking again.

With `standby.depth: built` a spare runs the script up to the train function as each rank of a node in use. When that
node is lost its ranks move to this spare, where their processes need not be started.
"""

from collections import Counter

from ...policies.placement import best_spare
from ...protocol.messages import BuildAhead
from ...protocol.reports import builds_ahead
from ...protocol.types import StandbyDepth, node_address
from ..built_ahead import cover
from ..recovery.state import JobState, Phase
from ..recovery.world import REACHABLE, AheadOrder, Node, NodeState
from .generation import request_node, start_command
from .promised_nodes import give_up_waiting
from .scaling import nodes_asked

TRIES = 6  # in a row that bring nothing
AGAIN_S = 60.0  # to the second try; each further one comes after twice as long


def refill(state: JobState, now: float) -> None:
    """Ask for as many spares as are missing. Runs when the job trains again, when it loses one, and when time is up."""
    arrivals, missing = state.arrivals, _missing(state)
    if missing <= 0 or arrivals.refill_due_s is not None or arrivals.refills >= TRIES:
        return
    for _ in range(missing):
        request_node(state)
    arrivals.refill_due_s = now + max(state.policy.deadlines.nodes_s, AGAIN_S * 2**arrivals.refills)
    arrivals.refills += 1


def refill_overdue(state: JobState, now: float) -> None:
    """What was asked for has come, was refused, or is not counted on any more: look again."""
    state.arrivals.refill_due_s = None
    give_up_waiting(state)
    refill(state, now)


def has_arrived(state: JobState) -> None:
    """A node has come: the platform has nodes to give."""
    state.arrivals.refills = 0
    if not state.world.named(NodeState.REQUESTED):
        state.arrivals.refill_due_s = None


def _missing(state: JobState) -> int:
    """Return how many spares are missing, once the job has had all that it was started with."""
    world, job = state.world, state.job
    if not state.arrivals.can_be_created or len(world.nodes) < nodes_asked(state) + job.spare_nodes:
        return 0
    have = set(world.named(NodeState.SPARE, NodeState.UNFIT, NodeState.REQUESTED)) - state.plans.going
    return job.spare_nodes - len(have)


def prepare(state: JobState) -> None:
    """Order each spare to build ahead. Runs after every event; does nothing but while the job trains."""
    if not builds_ahead(state.job) or state.phase is not Phase.RUNNING or not state.ever_resilient:
        return
    wanted = _wanted(state)
    for node in state.world.nodes.values():
        order = wanted.get(node.name, AheadOrder())
        if order == node.ahead:
            continue
        node.ahead = order
        node.prepared.pop(StandbyDepth.BUILT, None)  # what it has now is for others
        if node.state in REACHABLE:
            state.send(node_address(node.name), ahead_command(state, node))


def ahead_command(state: JobState, node: Node) -> BuildAhead:
    """Return what a node is to build ahead, as it is ordered now."""
    holders = state.world.holders
    return BuildAhead(tuple(start_command(state, holders[rank]) for rank in node.ahead.ranks if rank < len(holders)))


def spare_for(state: JobState, name: str) -> str:
    """Return the spare for the ranks of a node that is to be left; empty: there is none."""
    ranks = [holder.rank for holder in state.world.on(name)]
    return best_spare(state.world.spares(), ranks, built_on_spares(state))


def built_on_spares(state: JobState) -> dict[str, tuple[int, ...]]:
    """Return the ranks that each spare has built, for the ladder; without those that have built none."""
    nodes = (state.world.nodes[name] for name in state.world.spares())
    built = {node.name: node.prepared.get(StandbyDepth.BUILT) for node in nodes}
    return {name: prepared.ranks for name, prepared in built.items() if prepared is not None and prepared.ranks}


def _wanted(state: JobState) -> dict[str, AheadOrder]:
    """Return the order of each spare that is to build something."""
    world = state.world
    covered = cover(
        in_use=[name for name in world.group_nodes() if world.nodes[name].state is NodeState.ACTIVE],
        spares={name: world.nodes[name].ahead.nodes for name in world.spares()},
        failures=Counter(failure.node for failure in state.accounts.node_failures),
        most=state.policy.standby.nodes_per_spare,
    )
    orders = {}
    for spare, nodes in covered.items():
        ranks = tuple(holder.rank for name in nodes for holder in world.on(name))
        orders[spare] = AheadOrder(nodes, ranks, state.accounts.restarts, world.size)
    return orders
