"""Where the ranks that lose their process go: back to their node, or away from it.

One incident can have both: a rank whose script raised is started anew where it is, while the ranks of a
broken node move. What is wrong with a node or a device comes first, then what the policy still allows in
place.
"""

import msgspec

from ..protocol.types import FaultKind, FaultLevel, FaultReport
from .budgets import spent_out, tried
from .facts import Facts, Spent
from .schema import RungPolicy

# What a new process on the same device mends. NotHandleFault asks for nothing, so it bars nothing.
IN_PLACE_LEVELS = frozenset(
    {
        FaultLevel.SOFTWARE,
        FaultLevel.NOT_HANDLE,
        FaultLevel.RESTART_REQUEST,
        FaultLevel.RESTART_BUSINESS,
    }
)


class Placement(msgspec.Struct, frozen=True):
    """The answer: `in_place` and `moved` ranks, and the nodes to `leave`, each in order.

    `moved` are all ranks on the nodes of `leave`, healthy neighbours included. `misfits` say why a culprit
    cannot be restarted in place because of what is wrong with it, `obstacles` why the policy does not allow
    it. `broken` are the nodes of `leave` on which nothing may stay, whatever the rung; `closed` are these and
    those that only get no new process, for rungs that start every process anew. `homeless` are culprits whose
    node nobody knows.
    """

    in_place: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    leave: tuple[str, ...] = ()
    misfits: dict[int, str] = {}
    obstacles: dict[int, str] = {}
    broken: dict[str, str] = {}
    closed: dict[str, str] = {}
    homeless: tuple[int, ...] = ()


def place(facts: Facts, in_place: RungPolicy | None) -> Placement:
    """Say for each culprit whether it may restart in place under `in_place` (None: no such rung) or moves."""
    broken = broken_nodes(facts)
    misfits = _misfits(facts, broken)
    obstacles = _obstacles(facts, in_place, [rank for rank in facts.culprits if rank not in misfits])
    leave = set(broken)
    homeless = []
    for rank in facts.culprits:
        node = facts.nodes.get(rank)
        if node is None:
            homeless.append(rank)
        elif rank in misfits or rank in obstacles:
            leave.add(node)
    moved = [rank for rank, node in facts.nodes.items() if node in leave] if leave else []
    away = {*moved, *homeless}
    return Placement(
        in_place=tuple(sorted(rank for rank in set(facts.culprits) if rank not in away)),
        moved=tuple(sorted(moved)),
        leave=tuple(sorted(leave)),
        misfits=misfits,
        obstacles=obstacles,
        broken=broken,
        closed={**{node: why for node, why in facts.closed.items() if node in facts.nodes.values()}, **broken},
        homeless=tuple(sorted(set(homeless))),
    )


def broken_nodes(facts: Facts) -> dict[str, str]:
    """Return the nodes of the world on which no process may be started any more, with the reason for each."""
    in_use = set(facts.nodes.values())
    broken = {node: f"node {node} is lost" for node in sorted(facts.nodes_lost & in_use)}
    for node in sorted(facts.isolated & in_use):
        broken.setdefault(node, f"node {node} is isolated")
    for fault in facts.faults:
        place_of_fault = _node_of(facts, fault)
        if place_of_fault in in_use and _beyond_restart(fault):
            broken.setdefault(place_of_fault, _hardware_reason(fault, place_of_fault))
    return broken


def in_place_cost(facts: Facts, rung: RungPolicy, ranks: tuple[int, ...]) -> Spent:
    """Return what restarting `ranks` in place takes from the budget of `rung`."""
    nodes = {facts.nodes[rank] for rank in ranks if rank in facts.nodes}
    return Spent(rung.rung, facts.now, ranks, tuple(sorted(nodes)))


def _misfits(facts: Facts, broken: dict[str, str]) -> dict[int, str]:
    misfits = {}
    for rank in facts.culprits:
        node = facts.nodes.get(rank)
        if node is None:
            misfits[rank] = f"the node of rank {rank} is not known"
        elif node in broken:
            misfits[rank] = broken[node]
        elif node in facts.closed:
            misfits[rank] = facts.closed[node]
    return misfits


def _obstacles(facts: Facts, rung: RungPolicy | None, ranks: list[int]) -> dict[int, str]:
    """Say for each of `ranks` why the policy does not let it restart in place."""
    if rung is None:
        return dict.fromkeys(ranks, "recover_in_place is not on the ladder")
    everywhere = tried(facts, rung) + spent_out(facts, rung, Spent(rung.rung, facts.now))
    if everywhere:
        return dict.fromkeys(ranks, f"recover_in_place: {'; '.join(everywhere)}")
    obstacles = {}
    for rank in ranks:
        over = spent_out(facts, rung, in_place_cost(facts, rung, (rank,)))
        if over:
            obstacles[rank] = f"recover_in_place: {'; '.join(over)}"
    return obstacles


def _node_of(facts: Facts, fault: FaultReport) -> str | None:
    """Return the node that a report is about; one that names it is believed, ranks move."""
    if fault.node is not None:
        return fault.node
    return None if fault.rank is None else facts.nodes.get(fault.rank)


def _beyond_restart(fault: FaultReport) -> bool:
    return fault.kind is FaultKind.NODE_LOST or fault.level not in IN_PLACE_LEVELS


def _hardware_reason(fault: FaultReport, node: str) -> str:
    if fault.kind is FaultKind.NODE_LOST:
        return f"node {node} is lost"
    where = f"node {node}" if fault.rank is None else f"rank {fault.rank} on node {node}"
    code = "" if fault.code is None else f" (code {fault.code})"
    return f"{where} has a fault of level {fault.level}{code}, which no restart in place mends"
