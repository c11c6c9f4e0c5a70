"""TOPIC: nodes that come, go, and are promised; they are checked before they get ranks.

A node counts when its agent joins. One that was given up for lost is asked what runs there, so that it can be stopped.
The platform is asked for nodes that the job lacks, some times; it says which nodes it will take away, and which it
cannot bring. Operators may have a node killed, or a fault injected.
"""

from collections.abc import Iterator

from ...policies.budgets import worn_out
from ...policies.fault_codes import Treatment
from ...protocol import messages as m
from ...protocol.environment import visible_devices
from ...protocol.incidents import HoldRecord
from ...protocol.types import (
    CONTROLLER,
    PLATFORM,
    ArmedFault,
    Assertion,
    FaultAction,
    FaultKind,
    FaultLevel,
    FaultReport,
    Rendezvous,
    RunningProcess,
    node_address,
    rank_address,
)
from . import topic as do
from .events import HoldEnded, InjectRequested, KillNodeRequested, NodeReturned
from .fitness import Check
from .orders import request_missing, request_node, settle
from .state import OVER, JobState, Phase
from .topic import ALIVE, Owed, Recs, Row, Topic
from .world import GONE, REACHABLE, NodeState

NODE_GOING = "node_going"  # the code of the fault that a node has which is about to go
MAX_HOLDS = 100  # that are remembered
MAX_LOST_WAITING = 10  # nodes, before one start of the world
MAX_LOST = 10  # nodes, on their way to the same ranks; then they are not asked for again
MAX_FAILED = 10  # nodes whose check fails, before one start of the world, in whose place others are asked for

# Injuries that the agent can do from outside at once; the others, and all with a moment, need the processor.
FROM_OUTSIDE = frozenset({FaultAction.KILL, FaultAction.STOP})


# --- a node comes -----------------------------------------------------------------------------------------------------


def _on_node_joined(state: JobState, event: m.NodeJoined) -> Recs:
    """An agent is there: a new node, or one that found this controller again, or one that was given up for lost."""
    world, recs = state.world, []
    node, is_new = world.nodes.get(event.node), False
    if node is None or (node.state in {NodeState.LOST, NodeState.REQUESTED} and not node.given_back):
        node = world.add_node(event.node, NodeState.SPARE, event.failure_domain, late=state.generation > 0)
        node.note = _why_barred(state, event.node)
        if node.note:
            node.state = NodeState.ISOLATED
        recs.append(do.NodeCame())
        is_new = True
    node.greeted(event.store)
    devices = visible_devices(state.job.environment) or event.devices
    if devices:
        state.book.visible[event.node] = devices
    if node.state in REACHABLE:  # else the platform was told to end it, and is told again
        state.send(node_address(event.node), m.WelcomeNode(state.job))
    if is_new:
        _check(state, event.node)
    else:
        for receiver, order in _outstanding_checks(state, event.node):
            state.send(receiver, order)
    settle(state, event.node)
    for process in event.processes:
        is_early = state.planned.newcomer(process.rank, process.incarnation) is not None
        if not is_early and _is_stale(state, event.node, process):
            state.send(node_address(event.node), m.StopProcess(process.rank, process.incarnation, grace_s=0.0))
    return [*recs, do.StartIfPossible()] if state.phase is Phase.WAITING else recs


def _why_barred(state: JobState, name: str) -> str:
    """Return why a node is not used again by itself, however well it is; empty: nothing speaks against it."""
    failures = state.accounts.failures(state.policy.node, state.now)
    return worn_out(name, failures[name], state.policy.node) or ""


def _on_joined_too_late(state: JobState, event: m.NodeJoined) -> Recs:
    """The job is over: have a node that comes, or comes back, end what runs there."""
    if state.result is not None:
        state.send(node_address(event.node), m.EndJob(state.result.exit_code, state.result.reason))
    return None


def _is_stale(state: JobState, node: str, process: RunningProcess) -> bool:
    """Return whether a process on a node is none of the job's any more, e.g. its rank was given up with the node."""
    holder = state.world.holder(process.rank)
    if holder is None or holder.state in GONE:
        return True
    return (holder.node, holder.incarnation) != (node, process.incarnation)


def _on_node_returned(state: JobState, event: NodeReturned) -> Recs:
    """A node that was given up for lost is heard again: ask what runs there, so that it can be stopped."""
    node = state.world.nodes.get(event.node)
    if node is None or node.state is not NodeState.LOST:
        state.ignore("return of a node that was not lost")
    else:
        state.send(node_address(event.node), m.IntroduceNode())
    return None


def _on_store_moved(state: JobState, event: m.StoreMoved) -> Recs:
    """A rendezvous store listens elsewhere; a generation that meets at it will meet there."""
    if event.node in state.world.nodes:
        state.world.nodes[event.node].store = event.store
    return None


# --- a node goes ------------------------------------------------------------------------------------------------------


def _on_node_lost(state: JobState, event: m.NodeLost) -> Recs:  # noqa: PLR0911 - one line for each sort of loss
    """A node is gone, with everything on it."""
    node = state.world.nodes.get(event.node)
    if node is None or node.state is NodeState.LOST:
        state.ignore("loss of a node that is not there")
        return None
    was, node.state = node.state, NodeState.LOST
    state.checks.forget(event.node)
    _begin_checks(state)
    ranks = tuple(holder.rank for holder in state.world.on(event.node))
    if state.phase is Phase.WAITING:
        return _lost_while_waiting(state, ranks)
    if was is NodeState.ACTIVE and state.phase is Phase.SAVING:
        return [do.LostWhileSaving(ranks, event.reason)]
    if was is NodeState.REQUESTED and state.due.unplaced and not _another_comes(state):
        return [do.RungFailed(None, f"node {event.node}, for which ranks waited, is gone: {event.reason}")]
    if was is NodeState.SPARE and state.phase is Phase.RUNNING:
        return [do.Refill()]
    if was is not NodeState.ACTIVE or state.phase in OVER:
        return None
    if state.phase is Phase.FINISHING:
        return [do.EndNow(1, f"node {event.node} was lost after training had finished: {event.reason}")]
    kind, generation = FaultKind.NODE_LOST, state.generation
    report = FaultReport(
        kind, event.at_s, CONTROLLER, event.reason, node=event.node, generation=generation, output=event.output
    )
    return [do.Blame(report), do.Gone(ranks), do.Decide()]


def _lost_while_waiting(state: JobState, ranks: tuple[int, ...]) -> Recs:
    """A node that was waited for, or that was there already, is gone: another one is asked for in its place.

    A platform whose nodes end again and again is not asked for more; `deadlines.nodes_s` ends the wait then.
    """
    for rank in ranks:
        state.world.lose(state.world.holders[rank])
    lost = state.arrivals.one_less()
    if not _enough_promised(state) and state.arrivals.can_be_created and lost <= MAX_LOST_WAITING:
        request_node(state)
    return [do.StartIfPossible()]


def _another_comes(state: JobState) -> bool:
    """A node that was promised is gone: ask for another, some times; say whether all that are waited for can come."""
    if state.arrivals.one_less() <= MAX_LOST:
        request_missing(state)
    return _enough_promised(state)


def _enough_promised(state: JobState) -> bool:
    """Return whether as many nodes are promised as ranks wait for."""
    return len(state.world.named(NodeState.ACTIVE, NodeState.SPARE, NodeState.REQUESTED)) >= state.nodes_needed


def _on_node_refused(state: JobState, event: m.NodeRefused) -> Recs:
    """The platform has no such node to give."""
    node = state.world.nodes.get(event.node)
    if node is None or node.state is not NodeState.REQUESTED:
        state.ignore("refusal of a node that was not asked for")
        return None
    node.state = NodeState.LOST
    reason = f"the platform refused node {event.node}: {event.reason}"
    if state.due.unplaced and not _enough_promised(state):
        return [do.RungFailed(None, reason)]
    if state.phase is Phase.WAITING and not state.world.named(NodeState.REQUESTED):
        return [do.NodesMissing(reason)]
    return None


def _on_hold_ended(state: JobState, event: HoldEnded) -> Recs:
    """Most nodes were silent at once, and nothing was decided about them: remember it for the report."""
    state.history.holds.append(HoldRecord(state.now, event.held_s, event.nodes, event.watched, event.lost))
    del state.history.holds[:-MAX_HOLDS]
    return None


# --- what the platform says -------------------------------------------------------------------------------------------


def _on_platform_joined(state: JobState, event: m.PlatformJoined) -> Recs:
    """A platform is there: it is asked for the nodes that the job lacks, and that it does not have on their way."""
    arrivals = state.arrivals
    arrivals.can_be_created, arrivals.can_be_killed = event.can_create, event.can_kill
    for name in event.nodes:
        if name not in state.world.nodes:
            state.world.add_node(name, NodeState.REQUESTED)
    for name in state.world.named(NodeState.REQUESTED):
        if name not in event.nodes:
            state.send(PLATFORM, m.CreateNode(name))
    if event.can_create and state.phase is Phase.WAITING:
        request_missing(state, spares=state.job.spare_nodes if arrivals.spares_awaited else 0)
    return [do.Refill()] if event.can_create and state.phase is Phase.RUNNING else None


def _on_node_going(state: JobState, event: m.NodeGoing) -> Recs:
    """A node will be taken away: it gets no new process, and its ranks move at a step boundary, if there is a place."""
    node = state.world.nodes.get(event.node)
    if node is None or node.state in {NodeState.LOST, NodeState.REQUESTED}:
        state.ignore("a node that is not there is going")
        return None
    by = "" if event.within_s is None else f", within {event.within_s:g} s"
    report, news = state.book.enter(_report(state, event, f"{event.reason}{by}"), state.now)
    if not news:
        state.ignore("going of a node that is known")
        return None
    state.planned.going.add(event.node)
    settle(state, event.node)
    if state.world.on(event.node):
        return [do.Going(report)]
    return [do.Refill()] if state.phase is Phase.RUNNING else None


def staying(state: JobState, node: str) -> m.NodeStaying | None:
    """Say of a node that enrols that it stays, if it was going: that agent has gone, and this is another one."""
    return m.NodeStaying(node) if node in state.planned.going else None


def _on_node_staying(state: JobState, event: m.NodeStaying) -> Recs:
    """A node is not taken away after all: it is used again, unless it is to be left for another cause, too."""
    report = _report(state, event, "it stays", Assertion.RECOVER)
    standing = state.book.on(event.node, frozenset({Treatment.WATCH}))
    if not any(each.code == NODE_GOING and each.fault_id != report.fault_id for each in standing):
        state.planned.going.discard(event.node)
    return [do.SortOut(report)]


def _report(
    state: JobState, event: m.NodeGoing | m.NodeStaying, detail: str, assertion: Assertion = Assertion.OCCUR
) -> FaultReport:
    return FaultReport(
        FaultKind.NODE,
        state.now,
        PLATFORM,
        detail,
        node=event.node,
        generation=state.generation,
        level=FaultLevel.SUB_HEALTH,
        code=NODE_GOING,
        fault_id=event.cause.fault_of(event.node),
        assertion=assertion,
    )


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(state: JobState, name: str) -> None:
    """Have a node checked that is new, or was left before, if the policy wants that."""
    if state.policy.node_check.enabled and state.world.nodes[name].state is not NodeState.ISOLATED:
        state.checks.add(name)
        state.world.nodes[name].note = "it is being checked"
        _begin_checks(state)


def _use_again(state: JobState, rec: do.UseAgain) -> Recs:
    """A node that was left is well again: it is a spare, if nothing else bars it. An operator may have it so anyhow."""
    node, barred = state.world.nodes[rec.node], "" if rec.asked else _why_barred(state, rec.node)
    node.state, node.note = NodeState.ISOLATED if barred else NodeState.SPARE, barred
    if barred:
        return None
    _check(state, rec.node)
    node.state = NodeState.UNFIT if state.is_unfit(rec.node) else NodeState.SPARE
    return None


def _on_node_checked(state: JobState, event: m.NodeChecked) -> Recs:
    """A node says what its check has measured: it is used, paired again, or left."""
    verdicts = state.checks.take(event, state.policy.node_check.within_s)
    for name, why_not in verdicts.items():
        node = state.world.nodes[name]
        if why_not:
            node.state, node.note = NodeState.ISOLATED, f"its check has failed: {why_not}"
            state.say(f"node {name} is left: {why_not}")
            if state.arrivals.one_less() <= MAX_FAILED:
                request_missing(state)
            continue
        node.note = ""
        if node.state is NodeState.UNFIT and not state.is_unfit(name):
            node.state = NodeState.SPARE
    _begin_checks(state)
    return [do.StartIfPossible()] if state.phase is Phase.WAITING else None


def _begin_checks(state: JobState) -> None:
    """Begin every check that can begin."""
    world = state.world
    alone = min(state.nodes_asked, state.policy.scale.min_nodes or state.nodes_asked) == 1
    in_use = (*world.named(NodeState.SPARE), *world.named(NodeState.ACTIVE))
    good = [name for name in in_use if not state.checks.is_open(name)]
    while (begun := state.checks.begin(good, alone=alone)) is not None:
        for name in begun.nodes:
            state.send(node_address(name), _check_order(state, begun, name))


def _outstanding_checks(state: JobState, of: str = "") -> Iterator[Owed]:
    """Yield the orders that have not been answered, each with who gets it. `of`: only those of one node."""
    for each in state.checks.running:
        for name in each.nodes:
            if name not in each.answers and of in {"", name}:
                yield node_address(name), _check_order(state, each, name)


def _check_order(state: JobState, each: Check, name: str) -> m.CheckNode:
    place, store = None, state.world.nodes[each.nodes[0]].store
    if len(each.nodes) > 1 and store is not None:
        place = Rendezvous(store.host, store.port, state.meeting.secret(f"{state.job.job}/check/{each.number}"))
    return m.CheckNode(
        check=each.number,
        within_s=state.policy.node_check.within_s,
        computes=name in each.checked,
        number=each.nodes.index(name),
        store=place,
    )


# --- what operators ask for -------------------------------------------------------------------------------------------


def _on_inject_requested(state: JobState, event: InjectRequested) -> Recs:
    return _cause(state, do.CauseFault(event.fault))


def _cause(state: JobState, rec: do.CauseFault) -> Recs:
    """Hand a fault to the agent or process that can cause it."""
    fault, holder = rec.fault, state.world.holder(rec.fault.rank)
    if holder is None:
        state.ignore("fault for a rank that is not there")
    elif fault.point is None and fault.action is FaultAction.KILL_NODE:
        _kill(state, holder.node)
    elif fault.point is None and fault.action in FROM_OUTSIDE:
        state.send(node_address(holder.node), m.ArmFault(fault))
    else:
        state.send(rank_address(fault.rank), m.ArmFault(fault))
    return None


def _on_kill_node_requested(state: JobState, event: KillNodeRequested) -> Recs:
    """Have a node killed, by the platform or, where that cannot, by the node's own agent."""
    _kill(state, event.node)
    return None


def _kill(state: JobState, node: str) -> None:
    if state.arrivals.can_be_killed:
        state.send(PLATFORM, m.KillNode(node))
    else:
        state.send(node_address(node), m.ArmFault(ArmedFault(rank=0, action=FaultAction.KILL_NODE)))


# --- the topic --------------------------------------------------------------------------------------------------------


def _owes(state: JobState) -> Iterator[Owed]:
    for name in state.world.named(*REACHABLE):  # each answers with what runs there: strays are told to stop then
        yield node_address(name), m.WelcomeNode(state.job)
    for name in state.world.named(NodeState.REQUESTED):
        yield PLATFORM, m.CreateNode(name)
    for name in state.world.given_back():
        yield PLATFORM, m.DeleteNode(name)
    yield from _outstanding_checks(state)


NODES = Topic(
    name="nodes",
    takes=(
        Row(ALIVE, m.NodeJoined, _on_node_joined),
        Row((Phase.ENDED,), m.NodeJoined, _on_joined_too_late),
        Row(ALIVE, NodeReturned, _on_node_returned),
        Row(ALIVE, HoldEnded, _on_hold_ended),
        Row(ALIVE, m.NodeLost, _on_node_lost),
        Row(ALIVE, m.NodeRefused, _on_node_refused),
        Row(ALIVE, m.PlatformJoined, _on_platform_joined),
        Row(ALIVE, m.NodeGoing, _on_node_going),
        Row(ALIVE, m.NodeStaying, _on_node_staying),
        Row(ALIVE, m.NodeChecked, _on_node_checked),
        Row(ALIVE, m.StoreMoved, _on_store_moved),
        Row(tuple(phase for phase in ALIVE if phase is not Phase.WAITING), InjectRequested, _on_inject_requested),
        Row(ALIVE, KillNodeRequested, _on_kill_node_requested),
    ),
    answers={do.UseAgain: _use_again, do.CauseFault: _cause},
    owes=_owes,
)
