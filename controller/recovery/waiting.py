"""TOPIC: processes that are waited for: newcomers, and those that wait for their device, or for a node.

A device whose fault passes by itself is given the policy's time; so are the nodes that the platform was asked for as
part of the rung. Meanwhile the survivors are parked. Ranks whose node was left stay in its books until one has come.
"""

from collections.abc import Iterator

import msgspec

from ...protocol.types import FaultKind, Rung, node_address
from .orders import DEVICES, NEWCOMERS, NODES, await_newcomers, faults_of, give_up_waiting, start_command
from .state import JobState, Phase
from .topic import Blame, Deadline, Decide, Recs, ReleaseHeld, Rule, RungFailed, Topic
from .world import NodeState, RankState


def _newcomers_late(state: JobState) -> Recs:
    starting = state.world.ranks(RankState.STARTING) - state.due.unplaced
    late = faults_of(state, starting, FaultKind.START_FAILED, "has not reached its train function")
    return [*map(Blame, late), Decide()] if late else None


def _release_held(state: JobState, _: ReleaseHeld | None = None) -> Recs:
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
    recs: list[Blame | RungFailed] = []
    reasons = []
    for rank in sorted(state.due.held):
        fault = state.book.passing(state.world.holders[rank].node, rank)
        if fault is not None:
            recs.append(Blame(msgspec.structs.replace(fault, rank=rank), known=True))
            reasons.append(f"{fault.level} of the device of rank {rank} still stands after {limit_s:g} s")
    return [*recs, RungFailed(Rung.RECOVER_IN_PLACE, "; ".join(reasons))] if reasons else _release_held(state)


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
    return [RungFailed(None, f"too few nodes came within {state.policy.deadlines.nodes_s:g} s")]


def _contradictions(state: JobState) -> Iterator[str]:
    starting, due = state.world.ranks(RankState.STARTING), state.due
    if due.held - starting:
        yield f"ranks {sorted(due.held)} wait for their devices, and not all of them are to be started"
    if due.unplaced - starting:
        yield f"ranks {sorted(due.unplaced)} wait for a node, and not all of them are to be started"
    if due.unplaced and _NODES.due(state) is None:
        yield f"ranks {sorted(due.unplaced)} wait for a node, and that has no deadline"


_NEWCOMERS = Deadline(NEWCOMERS, _newcomers_late, lambda state: state.policy.deadlines.start_s)
_DEVICES = Deadline(DEVICES, _devices_not_well, lambda state: state.policy.deadlines.device_s)
_NODES = Deadline(NODES, _no_node_came, lambda state: state.policy.deadlines.nodes_s)

WAITING = Topic(
    name="waiting",
    answers={ReleaseHeld: _release_held},
    rules=(Rule(frozenset({Phase.QUIESCING}), _node_has_come, _place),),
    deadlines=(_NEWCOMERS, _DEVICES, _NODES),
    contradictions=_contradictions,
)
