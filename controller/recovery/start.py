"""TOPIC: every process of the world starts: at the beginning, again after a checkpoint, or in another size.

A world waits for its nodes, for as long as the policy says, and a little longer for its spares. A job that has not
begun can do with fewer nodes once the others are overdue. A world that has begun starts again in its size, on the nodes
that stay and others in the place of those that go, or on new ones only; or in another size, with fewer nodes when one
is lost and none takes its place, with more when they come. Only whole nodes leave and come. What the survivors hold is
on disk by then, or cannot be (`saving.py`): every process is started with its new rank and the new number of ranks,
and loads it. The data position knows how to go on in another division.
"""

from collections.abc import Iterator

from ...policies.rungs import growth, may_grow
from ...protocol.types import CONTROLLER, FaultKind, FaultReport, Rung
from .orders import (
    LOOK,
    await_newcomers,
    end_process,
    give_back_all_nodes,
    give_up_waiting,
    next_generation,
    replace_node,
    request_missing,
    start,
    stop_all_processes,
)
from .state import JobState, Phase, PlannedChange
from .topic import (
    ChangeSize,
    Deadline,
    EndNow,
    NodesMissing,
    PhaseLimit,
    Plan,
    Recs,
    Restart,
    RungFailed,
    StartIfPossible,
    StartWorld,
    Topic,
)
from .world import DONE, NodeState, RankState

SPARES_WAIT_S = 5.0  # how long a job that has its nodes waits for its spares


# --- waiting for nodes ------------------------------------------------------------------------------------------------


def wait_for_nodes(state: JobState) -> Recs:
    """Start the world when there are enough nodes; until then wait, for as long as the policy says."""
    if _nodes_at_hand(state) < state.nodes_needed:
        state.enter(state.policy.deadlines.nodes_s)
        state.arrivals.nodes_due_s = state.due.phase_s
    return _start_if_possible(state)


def _start_if_possible(state: JobState, _: StartIfPossible | None = None) -> Recs:
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
    give_up_waiting(state)
    return [NodesMissing(f"too few nodes came within {state.policy.deadlines.nodes_s:g} s")]


def _nodes_missing(state: JobState, rec: NodesMissing) -> Recs:
    if _resize(state, rec.reason):
        return None
    if state.history.open is None:
        return [EndNow(1, rec.reason)]
    return [RungFailed(None, rec.reason)]


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


def _start_world(state: JobState, _: StartWorld | None = None) -> Recs:
    """Start a new process of every rank; where there are too few nodes, end all and wait for them."""
    if _nodes_at_hand(state) >= state.nodes_needed:
        _open_world(state)
        return None
    request_missing(state)
    stop_all_processes(state)
    return wait_for_nodes(state)


def _restart(state: JobState, rec: Restart) -> Recs:
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


def _change_size(state: JobState, rec: ChangeSize) -> Recs:
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
    size = min(nodes * world.ranks_per_node, state.job.world_size)
    world.resize(size)
    world.place([*kept, *world.spares()])
    if size != before and state.generation > 0:  # who comes a little late to the start need not wait
        state.planned.scaled_s = state.now
    _GROW.drop(state)
    for rank in range(size, before):
        state.forget(rank)
    state.history.replaced(range(max(size, before)))
    said = f"the world has {size} ranks on {nodes} of the {state.nodes_asked} nodes that the job asked for"
    _open_world(state)
    state.note("; ".join(filter(None, (remark, said))))
    state.say(state.remark)
    return True


def _grow(state: JobState) -> Recs:
    """Let a world that is too small grow, when there are nodes for it and the last change is long enough ago."""
    before = state.nodes_needed
    nodes = min(state.nodes_asked, before + len(state.world.named(NodeState.SPARE)))
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
    change = PlannedChange(
        report=FaultReport(FaultKind.NODE_JOINED, state.now, CONTROLLER, detail, node=state.world.spares()[0]),
        decision=growth(before, nodes, state.nodes_asked),
        charges=(),  # no failure, and so it takes no budget
        nodes=nodes,
    )
    return [Plan(change)]


def _follow(state: JobState) -> Recs:
    """Look after every event whether a world that is too small can grow; one that has all its ranks costs nothing."""
    if not state.is_too_small or state.planned.current is not None or _GROW.due(state) is not None:
        return None
    if state.phase is Phase.RUNNING and LOOK not in state.due.ahead and not state.world.has(*DONE):
        return _grow(state)
    return _grow(state) if state.can_restart_larger else None


def _contradictions(state: JobState) -> Iterator[str]:
    if state.phase is Phase.STARTING and state.world.has(RankState.ABSENT):
        yield f"the world starts, and ranks {sorted(state.world.ranks(RankState.ABSENT))} have no process"


# The world is looked at after every event; this is when that is worth it again.
_GROW = Deadline("growth", lambda state: None, ahead=True)

START = Topic(
    name="start",
    answers={
        StartIfPossible: _start_if_possible,
        StartWorld: _start_world,
        Restart: _restart,
        ChangeSize: _change_size,
        NodesMissing: _nodes_missing,
    },
    limits={Phase.WAITING: PhaseLimit(_waited_long_enough, lambda state: state.policy.deadlines.nodes_s)},
    follows=_follow,
    deadlines=(_GROW,),
    contradictions=_contradictions,
)
