"""Nodes are checked before they get ranks: at the start, when they join later, and before they are used again."""

from collections.abc import Iterator

from ...policies.fault_codes import Treatment
from ...protocol.messages import CheckNode, NodeChecked
from ...protocol.types import Rendezvous, node_address
from ..recovery.events import Log
from ..recovery.node_checks import Check
from ..recovery.state import JobState, Phase
from ..recovery.world import NodeState
from .generation import request_missing, start_if_possible
from .scaling import least_nodes, nodes_asked

# Faults that keep a node without ranks from being chosen.
UNFIT = frozenset(Treatment) - {Treatment.NOTE}
MAX_FAILED = 10  # nodes, before one start of the world, in whose place others are asked for


def is_unfit(state: JobState, name: str) -> bool:
    """Whether a node without ranks is not to be chosen now: a fault of it stands, or its check has not ended."""
    return bool(state.book.on(name, UNFIT)) or state.checks.is_open(name)


def check(state: JobState, name: str) -> None:
    """Have a node checked that is new, or was left before, if the policy wants that."""
    if state.policy.node_check.enabled and state.world.nodes[name].state is not NodeState.ISOLATED:
        state.checks.add(name)
        state.world.nodes[name].note = "it is being checked"
        _begin(state)


def forget(state: JobState, name: str) -> None:
    """A node is gone."""
    state.checks.forget(name)
    _begin(state)


def on_node_checked(state: JobState, event: NodeChecked, now: float) -> None:
    """A node says what its check has measured: it is used, paired again, or left."""
    verdicts = state.checks.take(event, state.policy.node_check.within_s)
    for name, why_not in verdicts.items():
        node = state.world.nodes[name]
        if why_not:
            node.state, node.note = NodeState.ISOLATED, f"its check has failed: {why_not}"
            state.turn.actions.append(Log(f"node {name} is left: {why_not}"))
            state.arrivals.lost += 1
            if state.arrivals.lost <= MAX_FAILED:
                request_missing(state)
            continue
        node.note = ""
        if node.state is NodeState.UNFIT and not is_unfit(state, name):
            node.state = NodeState.SPARE
    _begin(state)
    if state.phase is Phase.WAITING:
        start_if_possible(state, now)


def outstanding_checks(state: JobState, of: str = "") -> Iterator[tuple[str, CheckNode]]:
    """Yield the orders that have not been answered, each with its node. `of`: only those of one node."""
    for each in state.checks.running:
        for name in each.nodes:
            if name not in each.answers and of in ("", name):
                yield name, _order(state, each, name)


def _begin(state: JobState) -> None:
    """Begin every check that can begin."""
    world = state.world
    alone = min(nodes_asked(state), least_nodes(state) or nodes_asked(state)) == 1
    in_use = (*world.named(NodeState.SPARE), *world.named(NodeState.ACTIVE))
    good = [name for name in in_use if not state.checks.is_open(name)]
    while (begun := state.checks.begin(good, alone=alone)) is not None:
        for name in begun.nodes:
            state.send(node_address(name), _order(state, begun, name))


def _order(state: JobState, each: Check, name: str) -> CheckNode:
    store = state.world.nodes[each.nodes[0]].store
    place = None
    if len(each.nodes) > 1 and store is not None:
        secret = state.meeting.secret(f"{state.job.job}/check/{each.number}")
        place = Rendezvous(store.host, store.port, secret)
    return CheckNode(
        check=each.number,
        within_s=state.policy.node_check.within_s,
        computes=name in each.checked,
        number=each.nodes.index(name),
        store=place,
    )
