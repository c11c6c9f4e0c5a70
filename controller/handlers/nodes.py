"""When a node comes, goes, or cannot be had."""

from ...protocol.environment import visible_devices
from ...protocol.incidents import HoldRecord
from ...protocol.messages import (
    IntroduceNode,
    NodeJoined,
    NodeLost,
    NodeRefused,
    ProcessesPrepared,
    StopProcess,
    StoreMoved,
    WelcomeNode,
)
from ...protocol.types import CONTROLLER, FaultKind, FaultReport, RunningProcess, node_address
from ..changes.drain import newcomer_of
from ..changes.generation import nodes_needed, request_node, start_if_possible
from ..changes.node_checks import check, forget, outstanding_checks
from ..changes.promised_nodes import ask_again, enough_promised
from ..changes.scaling import resize
from ..changes.shutdown import end, lost_while_saving
from ..changes.spares import has_arrived, refill
from ..recovery.decision import blame, decide, rung_failed, too_many
from ..recovery.events import HoldEnded, Log, NodeReturned
from ..recovery.hardware_faults import settle
from ..recovery.state import OVER, JobState, Phase
from ..recovery.world import GONE, AheadOrder, NodeState

MAX_HOLDS = 100  # that are remembered
MAX_LOST_WAITING = 10  # nodes, before one start of the world


def on_node_joined(state: JobState, event: NodeJoined, now: float) -> None:
    """An agent is there: a new node, or one that found this controller again, or one that was given up for lost."""
    world = state.world
    node, is_new = world.nodes.get(event.node), False
    if node is None or (node.state in {NodeState.LOST, NodeState.REQUESTED} and not node.given_back):
        node = world.add_node(event.node, NodeState.SPARE, event.failure_domain, late=state.generation > 0)
        node.note = too_many(state, event.node, now) or ""
        if node.note:
            node.state = NodeState.ISOLATED
        has_arrived(state)
        is_new = True
    node.store = event.store
    node.ahead, node.prepared = AheadOrder(), {}  # its agent may be another one: it says what it has
    devices = visible_devices(state.job.environment) or event.devices
    if devices:
        state.book.visible[event.node] = devices
    state.send(node_address(event.node), WelcomeNode(state.job))
    if is_new:
        check(state, event.node)
    else:
        for name, order in outstanding_checks(state, event.node):
            state.send(node_address(name), order)
    settle(state, event.node)
    for process in event.processes:
        if newcomer_of(state, process.rank, process.incarnation) is not None:
            continue
        if _is_stale(state, event.node, process):
            state.send(node_address(event.node), StopProcess(process.rank, process.incarnation, grace_s=0.0))
    if state.phase is Phase.WAITING:
        start_if_possible(state, now)


def _is_stale(state: JobState, node: str, process: RunningProcess) -> bool:
    """Whether a process that runs on a node is none of the job's any more, e.g. its rank was given up with the node."""
    if process.rank >= state.world.size:
        return True
    holder = state.world.holders[process.rank]
    return (holder.node, holder.incarnation) != (node, process.incarnation) or holder.state in GONE


def on_node_returned(state: JobState, event: NodeReturned, now: float) -> None:
    """A node that was given up for lost is heard again: ask what runs there, so that it can be stopped."""
    node = state.world.nodes.get(event.node)
    if node is None or node.state is not NodeState.LOST:
        state.ignore("return of a node that was not lost")
    else:
        state.send(node_address(event.node), IntroduceNode())


def on_node_lost(state: JobState, event: NodeLost, now: float) -> None:
    """A node is gone, with everything on it."""
    node = state.world.nodes.get(event.node)
    if node is None or node.state is NodeState.LOST:
        state.ignore("loss of a node that is not there")
        return
    was, node.state = node.state, NodeState.LOST
    forget(state, event.node)
    if state.phase is Phase.WAITING:
        _lost_while_waiting(state, event.node, now)
        return
    if was is NodeState.ACTIVE and state.phase is Phase.SAVING:
        lost_while_saving(state, [holder.rank for holder in state.world.on(event.node)], event.reason, now)
        return
    if was is NodeState.REQUESTED and state.due.unplaced and not ask_again(state):
        rung_failed(state, None, f"node {event.node}, for which ranks waited, is gone: {event.reason}", now)
    elif was is NodeState.SPARE and state.phase is Phase.RUNNING:
        refill(state, now)
    if was is not NodeState.ACTIVE or state.phase in OVER:
        return
    if state.phase is Phase.FINISHING:
        end(state, 1, f"node {event.node} was lost after training had finished: {event.reason}", now)
        return
    report = FaultReport(
        kind=FaultKind.NODE_LOST,
        at_s=event.at_s,
        seen_by=CONTROLLER,
        detail=event.reason,
        node=event.node,
        generation=state.generation,
        output=event.output,
    )
    lost = state.world.on(event.node)
    state.remember(report, now)
    blame(state, report)
    for holder in lost:
        state.world.lose(holder)
    decide(state, now)


def _lost_while_waiting(state: JobState, name: str, now: float) -> None:
    """A node that was waited for, or that was there already, is gone: another one is asked for in its place.

    A platform whose nodes end again and again is not asked for more; `deadlines.nodes_s` ends the wait then.
    """
    for holder in state.world.on(name):
        state.world.lose(holder)
    state.arrivals.lost += 1
    have = state.world.named(NodeState.ACTIVE, NodeState.SPARE, NodeState.REQUESTED)
    if len(have) < nodes_needed(state) and state.arrivals.can_be_created and state.arrivals.lost <= MAX_LOST_WAITING:
        request_node(state)
    start_if_possible(state, now)


def on_hold_ended(state: JobState, event: HoldEnded, now: float) -> None:
    """Most nodes were silent at once, and nothing was decided about them: remember it for the report."""
    state.history.holds.append(HoldRecord(now, event.held_s, event.nodes, event.watched, event.lost))
    del state.history.holds[:-MAX_HOLDS]


def on_node_refused(state: JobState, event: NodeRefused, now: float) -> None:
    """The platform has no such node to give."""
    node = state.world.nodes.get(event.node)
    if node is None or node.state is not NodeState.REQUESTED:
        state.ignore("refusal of a node that was not asked for")
        return
    node.state = NodeState.LOST
    if state.due.unplaced and not enough_promised(state):
        rung_failed(state, None, f"the platform refused node {event.node}: {event.reason}", now)
    elif state.phase is Phase.WAITING and not state.world.named(NodeState.REQUESTED):
        nodes_missing(state, f"the platform refused node {event.node}: {event.reason}", now)


def on_store_moved(state: JobState, event: StoreMoved, now: float) -> None:
    """A rendezvous store listens elsewhere; a generation that meets at it will meet there."""
    if event.node in state.world.nodes:
        state.world.nodes[event.node].store = event.store


def on_processes_prepared(state: JobState, event: ProcessesPrepared, now: float) -> None:
    """A node has prepared what may be needed: remember it, and say what it costs, of each depth at first."""
    node = state.world.nodes.get(event.node)
    if node is None:
        state.ignore("processes that are prepared on a node that is not there")
        return
    prepared = event.prepared
    is_first = all(prepared.depth not in each.prepared for each in state.world.nodes.values())
    node.prepared[prepared.depth] = prepared
    if is_first or (node.state is NodeState.SPARE and prepared.ranks):
        state.turn.actions.append(Log(f"{event.node}: {prepared.in_words()}"))


def nodes_missing(state: JobState, reason: str, now: float) -> None:
    """Too few nodes will come: the world gets smaller, the rung that asked for them has failed, or the job ends."""
    if resize(state, now, reason):
        return
    if state.history.open is None:
        end(state, 1, reason, now)
    else:
        rung_failed(state, None, reason, now)
