"""TOPIC: processes that start: all of the world at the beginning, again, or in another size; and those waited for.

A world waits for its nodes, for as long as the policy says, and a little longer for its spares. A job that has not
begun can do with fewer nodes once the others are overdue. A world that has begun starts again in its size, on the nodes
that stay and others in the place of those that go, or on new ones only; or in another size, with fewer nodes when one
is lost and none takes its place, with more when they come. Only whole nodes leave and come. What the survivors hold is
on disk by then, or cannot be (`saving.py`): every process is started with its new rank and the new number of ranks,
and loads it. The data position knows how to go on in another division. A policy may have the world grow in place: the
ranks that it has keep their numbers and processes, and new ones are started beside them, which get their state from
them at a step boundary.

In an incident newcomers are waited for: until they reach their train function, and before that for their device, or
for a node. A device whose fault passes by itself is given the policy's time; so are the nodes that the platform was
asked for as part of the rung. Meanwhile the survivors are parked. Ranks whose node was left stay in its books until one
has come.
"""

from collections.abc import Iterator

import msgspec

from ...policies.rungs import growth, may_grow
from ...protocol.messages import StopProcess
from ...protocol.types import CONTROLLER, FaultKind, FaultReport, Rung, node_address
from ...protocol.wording import one_line
from . import topic as do
from .fitness import UNFIT
from .orders import (
    DEVICES,
    LOOK,
    NEWCOMERS,
    NODES,
    await_newcomers,
    end_process,
    faults_of,
    give_back_all_nodes,
    give_up_waiting,
    hand_to,
    next_generation,
    replace_node,
    request_missing,
    size_on,
    start,
    start_command,
    stop_all_processes,
)
from .state import JobState, Newcomer, Phase, PlannedChange
from .topic import Deadline, Follow, PhaseLimit, Recs, Rule, Topic
from .world import DONE, NodeState, RankState

SPARES_WAIT_S = 5.0  # how long a job that has its nodes waits for its spares
TRIES = 3  # of new ranks on one node, beside a world that trains
_NAMED = 3  # nodes, in the reason of a wait that has ended


# --- waiting for nodes ------------------------------------------------------------------------------------------------


def wait_for_nodes(state: JobState) -> Recs:
    """Start the world when there are enough nodes; until then wait, for as long as the policy says."""
    if _nodes_at_hand(state) < state.nodes_needed:
        state.enter(state.policy.deadlines.nodes_s)
        state.arrivals.nodes_due_s = state.due.phase_s
    return _start_if_possible(state)


def _start_if_possible(state: JobState, _: do.StartIfPossible | None = None) -> Recs:
    """Start the world that waits once there are enough nodes for it, and its spares have come or are overdue."""
    have = _nodes_at_hand(state)
    if have < state.nodes_needed:
        _last_call(state, have)
    elif state.arrivals.spares_awaited and have < state.nodes_needed + state.job.spare_nodes:
        state.hurry(state.now + SPARES_WAIT_S)
    else:
        _open_world(state)
    return None


def _last_call(state: JobState, have: int) -> None:
    """Limit the wait of a job that has not begun and can do with the nodes that are there."""
    arrivals, scale = state.arrivals, state.policy.scale
    if state.generation > 0 or scale.min_nodes is None or arrivals.nodes_due_s is None:
        return
    if have < scale.min_nodes:
        arrivals.last_call_s = None
    elif arrivals.last_call_s is None:
        arrivals.last_call_s = state.now + scale.last_call_s
    limits = (arrivals.nodes_due_s, arrivals.last_call_s)
    state.limit_until(min(limit for limit in limits if limit is not None))


def _nodes_at_hand(state: JobState) -> int:
    return len(state.world.named(NodeState.ACTIVE, NodeState.SPARE))


def _waited_long_enough(state: JobState) -> Recs:
    if _nodes_at_hand(state) >= state.nodes_needed:
        state.arrivals.spares_awaited = False
        return _start_if_possible(state)
    unfit = [(name, fault) for name in state.world.named(NodeState.UNFIT) for fault in state.book.on(name, UNFIT)[:1]]
    why = "".join(f"; {name} is not used: {fault.level} {one_line(fault.detail)}" for name, fault in unfit[:_NAMED])
    give_up_waiting(state)
    return [do.NodesMissing(f"too few nodes came within {state.policy.deadlines.nodes_s:g} s{why}")]


def _nodes_missing(state: JobState, rec: do.NodesMissing) -> Recs:
    if _resize(state, rec.reason):
        return None
    if state.history.open is None:
        return [do.EndNow(1, rec.reason)]
    return [do.RungFailed(None, rec.reason)]


# --- the start --------------------------------------------------------------------------------------------------------


def _open_world(state: JobState) -> None:
    """Start a new process of every rank: where it was, or on a spare in the place of a node that has gone."""
    state.arrivals.spares_awaited = False
    state.arrivals.enough()
    world = state.world
    before = {holder.rank: holder.node for holder in world.holders}
    spares = iter(world.spares())
    in_place = [name if world.nodes[name].state is NodeState.ACTIVE else next(spares) for name in world.group_nodes()]
    world.place([*in_place, *spares])
    for holder in world.holders:
        if holder.node != before[holder.rank]:
            end_process(state, holder, before[holder.rank])
    if state.generation > 0:
        state.accounts.restarts += 1
    if state.turn.came_in is Phase.STARTING and state.ever_resilient:
        state.meeting.link_up_failed(state.world)  # a world that links up as it starts did not get that far
    next_generation(state, range(world.size))
    for holder in world.holders:
        start(state, holder, connected=True)
    # A plain script never joins; one that has joined before must do so again.
    await_newcomers(state, some=state.ever_resilient)
    state.enter()


def _start_world(state: JobState, _: do.StartWorld | None = None) -> Recs:
    """Start a new process of every rank; where there are too few nodes, end all and wait for them."""
    if _nodes_at_hand(state) >= state.nodes_needed:
        _open_world(state)
        return None
    request_missing(state)
    stop_all_processes(state)
    return wait_for_nodes(state)


def _restart(state: JobState, rec: do.Restart) -> Recs:
    """Start every process again, as soon as there are nodes."""
    if rec.remark:
        state.note(rec.remark)
        state.say(rec.remark)
    if rec.goal.every_node:
        give_back_all_nodes(state)
    else:
        nodes = state.world.nodes
        lost = [name for name in state.world.group_nodes() if nodes[name].state is NodeState.LOST]
        for name in dict.fromkeys((*rec.goal.leaving, *lost)):  # lost, or refused, while the checkpoint was written
            if not nodes[name].given_back:
                replace_node(state, name)
    return _start_world(state)


# --- in another size --------------------------------------------------------------------------------------------------


def _change_size(state: JobState, rec: do.ChangeSize) -> Recs:
    """Start the world in another size, or wait for its nodes."""
    for name in rec.goal.leaving:
        replace_node(state, name)
    awaited = state.arrivals.can_be_created and bool(state.world.named(NodeState.REQUESTED))
    if not awaited and _resize(state, rec.remark):
        return None
    state.note(rec.remark)
    stop_all_processes(state)
    return wait_for_nodes(state)


def _resize(state: JobState, remark: str) -> bool:
    """Start the world again on the nodes that are there; False when they are fewer than the policy allows.

    Its size is what they can hold, up to what the job asked for.
    """
    world, before = state.world, state.world.size
    have = world.named(NodeState.ACTIVE, NodeState.SPARE)
    nodes = min(len(have), state.nodes_asked)
    if nodes < (state.policy.scale.min_nodes or state.nodes_needed):
        return False
    stop_all_processes(state)
    kept = [name for name in world.group_nodes() if world.nodes[name].state is NodeState.ACTIVE]
    size = size_on(state, nodes)
    world.resize(size)
    for holder in world.holders:
        holder.needs = ()  # state is divided in another way
    world.place([*kept, *world.spares()])
    if size != before and state.generation > 0:  # who comes a little late to the start need not wait
        state.planned.scaled_s = state.now
    _GROW.drop(state)
    for rank in range(size, before):
        state.forget(rank)
    state.history.replaced(range(max(size, before)))
    _open_world(state)
    _say_size(state, remark)
    return True


def _say_size(state: JobState, remark: str) -> None:
    size, nodes = state.world.size, state.nodes_needed
    said = f"the world has {size} ranks on {nodes} of the {state.nodes_asked} nodes that the job asked for"
    state.note("; ".join(filter(None, (remark, said))))
    state.say(state.remark)


def _grow(state: JobState) -> Recs:
    """Let a world that is too small grow, when there are nodes for it and the last change is long enough ago."""
    before, in_place = state.nodes_needed, state.policy.scale.in_place and state.ever_resilient
    spares = [name for name in state.world.spares() if not in_place or state.planned.unable.get(name, 0) < TRIES]
    nodes = min(state.nodes_asked, before + len(spares))
    if nodes == before:
        return None
    least_s = state.policy.scale.min_interval_s
    if state.now < state.planned.scaled_s + least_s:
        _GROW.at_time(state, state.planned.scaled_s + least_s)
        return None
    question = may_grow(state.now, {each.rank: each.node for each in state.world.holders})
    if state.ladder.refusals(question, Rung.RESCHEDULE_POD):
        _GROW.within(state, max(1.0, least_s))
        return None
    _GROW.drop(state)
    if not state.ever_resilient:
        _resize(state, f"the world grows from {before} to {nodes} nodes, and all processes restart")
        return None
    detail = f"{nodes} of the {state.nodes_asked} nodes that the job asked for are there, and the world has {before}"
    joins = tuple(spares[: nodes - before]) if in_place else ()
    newcomers = _newcomers(state, joins)
    change = PlannedChange(
        report=FaultReport(FaultKind.NODE_JOINED, state.now, CONTROLLER, detail, node=spares[0]),
        decision=growth(before, nodes, state.nodes_asked, in_place=in_place),
        charges=(),  # no failure, and so it takes no budget
        nodes=nodes,
        joins=joins,
        newcomers=newcomers,
        awaiting=set(newcomers),
    )
    return [do.Plan(change)]


def _newcomers(state: JobState, joins: tuple[str, ...]) -> dict[int, Newcomer]:
    """Return the processes of the ranks that a larger world has on the nodes that join it."""
    world = state.world
    places = [name for name in joins for _ in range(world.ranks_per_node)]
    ranks = range(world.size, size_on(state, state.nodes_needed + len(joins)))
    held = {rank: world.to_be(rank).next_incarnation() for rank in ranks}
    return {rank: Newcomer(rank, held[rank], name) for rank, name in zip(ranks, places, strict=False)}


def _enlarge(state: JobState, rec: do.Enlarge) -> Recs:
    """Give a world whose ranks all stand at a step boundary more ranks, on nodes that have joined."""
    names = [*state.world.group_nodes(), *rec.change.joins]
    new = state.world.enlarge(size_on(state, len(names)))
    state.world.place(names)
    for each in rec.change.newcomers.values():  # from here on the rank's orders are for them (`routes.py`)
        state.send(node_address(each.node), StopProcess(each.rank, each.incarnation - 1, grace_s=0.0))
    state.planned.scaled_s = state.now
    _GROW.drop(state)
    _say_size(state, "")
    return [do.OpenGeneration(moved=tuple(new)), do.AskNewcomers(hand_to(state, rec.change.newcomers))]


def _follow(state: JobState) -> Recs:
    """Look after every event whether a world that is too small can grow; one that has all its ranks costs nothing."""
    if state.world.size == state.job.world_size or state.planned.current is not None or _GROW.due(state) is not None:
        return None
    if state.phase is Phase.RUNNING and LOOK not in state.due.ahead and not state.world.has(*DONE):
        return _grow(state)
    return _grow(state) if state.can_restart_larger else None


# --- newcomers that are waited for ------------------------------------------------------------------------------------


def _newcomers_late(state: JobState) -> Recs:
    starting = state.world.ranks(RankState.STARTING) - state.due.unplaced
    late = faults_of(state, starting, FaultKind.START_FAILED, "has not reached its train function")
    return [*map(do.Blame, late), do.Decide()] if late else None


def _release_held(state: JobState, _: do.ReleaseHeld | None = None) -> Recs:
    """Start the processes whose devices are well again."""
    for rank in sorted(state.due.held):
        holder = state.world.holders[rank]
        if state.book.passing(holder.node, rank) is None:
            state.due.held.discard(rank)
            state.send(node_address(holder.node), start_command(state, holder))
            await_newcomers(state)
    if not state.due.held:
        _DEVICES.drop(state)
    return None


def _devices_not_well(state: JobState) -> Recs:
    """Faults that should have passed still stand: a new process on these devices would not do."""
    limit_s = state.policy.deadlines.device_s
    recs: list[do.Blame | do.RungFailed] = []
    reasons = []
    for rank in sorted(state.due.held):
        fault = state.book.passing(state.world.holders[rank].node, rank)
        if fault is not None:
            recs.append(do.Blame(msgspec.structs.replace(fault, rank=rank), known=True))
            reasons.append(f"{fault.level} of the device of rank {rank} still stands after {limit_s:g} s")
    return [*recs, do.RungFailed(Rung.RECOVER_IN_PLACE, "; ".join(reasons))] if reasons else _release_held(state)


def _node_has_come(state: JobState) -> bool:
    return bool(state.due.unplaced) and bool(state.world.named(NodeState.SPARE))


def _place(state: JobState) -> Recs:
    """Start the ranks of a node that was left on one that has come. Until then they stay in the books of the former."""
    old = state.world.holders[min(state.due.unplaced)].node
    new = state.world.spares()[0]
    state.world.move(old, new)
    for holder in state.world.on(new):
        if holder.rank in state.due.unplaced:
            state.due.unplaced.discard(holder.rank)
            state.send(node_address(new), start_command(state, holder))
    state.arrivals.enough()
    await_newcomers(state)
    return None


def _no_node_came(state: JobState) -> Recs:
    give_up_waiting(state)
    return [do.RungFailed(None, f"too few nodes came within {state.policy.deadlines.nodes_s:g} s")]


def _contradictions(state: JobState) -> Iterator[str]:
    starting, due = state.world.ranks(RankState.STARTING), state.due
    if due.held - starting:
        yield f"ranks {sorted(due.held)} wait for their devices, and not all of them are to be started"
    if due.unplaced - starting:
        yield f"ranks {sorted(due.unplaced)} wait for a node, and not all of them are to be started"
    if due.unplaced and _NODES.due(state) is None:
        yield f"ranks {sorted(due.unplaced)} wait for a node, and that has no deadline"
    if state.phase is Phase.STARTING and state.world.has(RankState.ABSENT):
        yield f"the world starts, and ranks {sorted(state.world.ranks(RankState.ABSENT))} have no process"


_NEWCOMERS = Deadline(NEWCOMERS, _newcomers_late, lambda state: state.policy.deadlines.start_s)
_DEVICES = Deadline(DEVICES, _devices_not_well, lambda state: state.policy.deadlines.device_s)
_NODES = Deadline(NODES, _no_node_came, lambda state: state.policy.deadlines.nodes_s)
# The world is looked at after every event; this is when that is worth it again.
_GROW = Deadline("growth", lambda state: None, ahead=True)

START = Topic(
    name="start",
    answers={
        do.StartIfPossible: _start_if_possible,
        do.StartWorld: _start_world,
        do.Restart: _restart,
        do.ChangeSize: _change_size,
        do.Enlarge: _enlarge,
        do.NodesMissing: _nodes_missing,
        do.ReleaseHeld: _release_held,
    },
    rules=(Rule(frozenset({Phase.QUIESCING}), _node_has_come, _place),),
    limits={Phase.WAITING: PhaseLimit(_waited_long_enough, lambda state: state.policy.deadlines.nodes_s)},
    follows=Follow(frozenset({Phase.RUNNING, Phase.STARTING}), _follow),
    deadlines=(_NEWCOMERS, _DEVICES, _NODES, _GROW),
    contradictions=_contradictions,
)
