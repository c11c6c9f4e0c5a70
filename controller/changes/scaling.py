"""A world of another size: with fewer nodes when one is lost and none takes its place, with more when they come.

Only whole nodes leave and come. What the survivors hold is saved first, then every process is started again with its
new rank and the new number of ranks, and loads it. The data position knows how to go on in another division.
"""

import math

from ...policies.rungs import growth, may_grow
from ...protocol.types import CONTROLLER, FaultKind, FaultReport, Rung
from ..recovery.events import Log
from ..recovery.state import JobState, Plan
from ..recovery.world import NodeState
from .boundary import read_clocks
from .generation import nodes_needed, open_world, replace_node, stop_all_processes, wait_for_nodes


def nodes_asked(state: JobState) -> int:
    """Return how many nodes the job asked for."""
    return math.ceil(state.job.world_size / state.world.ranks_per_node)


def least_nodes(state: JobState) -> int | None:
    """Return with how few nodes the world may go on; None: with no fewer than it has."""
    return state.policy.scale.min_nodes


def resize(state: JobState, now: float, remark: str) -> bool:
    """Start the world again on the nodes that are there; False when they are fewer than the policy allows.

    Its size is what they can hold, up to what the job asked for.
    """
    world, before = state.world, state.world.size
    have = world.named(NodeState.ACTIVE, NodeState.SPARE)
    nodes = min(len(have), nodes_asked(state))
    if nodes < (least_nodes(state) or nodes_needed(state)):
        return False
    stop_all_processes(state)
    kept = [name for name in world.group_nodes() if world.nodes[name].state is NodeState.ACTIVE]
    size = min(nodes * world.ranks_per_node, state.job.world_size)
    world.resize(size)
    world.place([*kept, *world.spares()])
    if size != before and state.generation > 0:  # who comes a little late to the start need not wait
        state.plans.scaled_s = now
    state.plans.grow_due_s = None
    for rank in range(size, before):
        state.forget(rank)
    state.history.replaced(range(max(size, before)))
    said = f"the world has {size} ranks on {nodes} of the {nodes_asked(state)} nodes that the job asked for"
    open_world(state, now)
    state.plans.remark = "; ".join(filter(None, (remark, said)))
    state.turn.actions.append(Log(state.plans.remark))
    return True


def start_anew(state: JobState, now: float, remark: str, leaving: tuple[str, ...]) -> None:
    """What the survivors hold is saved, or cannot be (`remark` says it): start the world, or wait for its nodes."""
    for name in leaving:
        replace_node(state, name)
    awaited = state.arrivals.can_be_created and bool(state.world.named(NodeState.REQUESTED))
    if not awaited and resize(state, now, remark):
        return
    state.plans.remark = remark
    stop_all_processes(state)
    wait_for_nodes(state, now)


def consider_growth(state: JobState, now: float) -> None:
    """Let a world that is too small grow, when there are nodes for it and the last change is long enough ago."""
    plans, before = state.plans, nodes_needed(state)
    nodes = min(nodes_asked(state), before + len(state.world.named(NodeState.SPARE)))
    if nodes == before:
        return
    earliest_s = plans.scaled_s + state.policy.scale.min_interval_s
    if now < earliest_s:
        plans.grow_due_s = earliest_s
        return
    question = may_grow(now, {each.rank: each.node for each in state.world.holders}, state.spent)
    if state.ladder.refusals(question, Rung.RESCHEDULE_POD):
        plans.grow_due_s = now + max(1.0, state.policy.scale.min_interval_s)
        return
    plans.grow_due_s = None
    if not state.ever_resilient:
        resize(state, now, f"the world grows from {before} to {nodes} nodes, and all processes restart")
        return
    name = state.world.spares()[0]
    detail = f"{nodes} of the {nodes_asked(state)} nodes that the job asked for are there, and the world has {before}"
    plans.current = plan = Plan(
        report=FaultReport(FaultKind.NODE_JOINED, now, CONTROLLER, detail, node=name),
        decision=growth(before, nodes, nodes_asked(state)),
        charges=state.ladder.course(question, Rung.RESCHEDULE_POD).cost,
        nodes=nodes,
    )
    read_clocks(state, plan, now)
