"""Where the ranks at fault go: nowhere, because their process can mend itself; back to their node; or away from it.

One incident can have all three: a rank with a memory error stays with its process, one whose script raised is
restarted where it is, and the ranks of a broken node move. What is wrong with a node or a device comes first, then
what the policy still allows.
"""

from collections.abc import Iterable, Mapping

import msgspec

from ..protocol.types import FaultKind, FaultLevel, FaultReport, Rung
from .budgets import WORLD_RESTARTS, Account, Facts, Party, Roles, Spent, failures_by_node, tried, worn_out
from .schema import NodePolicy, RungPolicy

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
    """The answer: `mended`, `in_place` and `moved` ranks, and the nodes to `leave`, each in order.

    `mended` are at fault and keep their process; `culprits` are at fault and lose it. `moved` are all ranks on the
    nodes of `leave`, healthy neighbours included. `misfits` say why a culprit cannot be restarted in place because of
    what is wrong with it, `obstacles` why the policy does not allow it, `unmended` why one that could mend itself may
    not. `broken` are the nodes of `leave` on which nothing may stay, whatever the rung; `closed` are these and those
    that only get no new process, for rungs that restart every process; `worn` are nodes that have failed too often
    and can be replaced. `homeless` are culprits whose node is not known. `to` is the spare that the ranks of each node
    of `leave` move to, as far as there are spares, and `built` are those of `moved` whose next process is built there.
    """

    culprits: tuple[int, ...] = ()
    mended: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    leave: tuple[str, ...] = ()
    misfits: dict[int, str] = {}
    obstacles: dict[int, str] = {}
    unmended: dict[int, str] = {}
    broken: dict[str, str] = {}
    closed: dict[str, str] = {}
    worn: dict[str, str] = {}
    homeless: tuple[int, ...] = ()
    to: dict[str, str] = {}
    built: tuple[int, ...] = ()


def place(facts: Facts, roles: Roles, node_policy: NodePolicy) -> Placement:
    """Say for each rank at fault whether it mends itself, restarts in place or moves, by its party's ladder."""
    in_use = set(facts.nodes.values())
    broken = broken_nodes(facts)
    worn = _worn_nodes(facts, roles, node_policy, broken)
    at_fault = set(facts.culprits)
    unmended = _unmended(facts, roles, broken, worn, [rank for rank in facts.mendable if rank not in at_fault])
    culprits = sorted({*at_fault, *unmended})
    misfits = _misfits(facts, broken, culprits)
    obstacles = _obstacles(facts, roles, worn, [rank for rank in culprits if rank not in misfits])
    leave = set(broken)
    homeless = []
    for rank in culprits:
        node = facts.nodes.get(rank)
        if node is None:
            homeless.append(rank)
        elif rank in misfits or rank in obstacles:
            leave.add(node)
    moved = [rank for rank, node in facts.nodes.items() if node in leave] if leave else []
    away = {*moved, *homeless}
    to = _spares_for(facts, sorted(leave))
    staying = {*culprits, *away}
    return Placement(
        culprits=tuple(culprits),
        mended=tuple(sorted(rank for rank in set(facts.mendable) if rank not in staying)),
        in_place=tuple(rank for rank in culprits if rank not in away),
        moved=tuple(sorted(moved)),
        leave=tuple(sorted(leave)),
        misfits=misfits,
        obstacles=obstacles,
        unmended=unmended,
        broken=broken,
        closed={node: why for node, why in facts.closed.items() if node in in_use} | broken,
        worn=worn,
        homeless=tuple(sorted(set(homeless))),
        to=to,
        built=tuple(sorted(rank for rank in moved if rank in facts.built_ahead.get(to.get(facts.nodes[rank], ""), ()))),
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


def _spares_for(facts: Facts, leave: list[str]) -> dict[str, str]:
    """Give each node that is left a spare: one that has built its ranks, or else the one that has waited longest."""
    spares, to = list(facts.usable_spares()), {}
    for node in leave if facts.built_ahead else ():
        ranks = [rank for rank, where in facts.nodes.items() if where == node]
        best = best_spare(spares, ranks, facts.built_ahead)
        if not set(ranks).isdisjoint(facts.built_ahead.get(best, ())):
            to[node] = best
            spares.remove(best)
    left = [node for node in leave if node not in to]
    return to | dict(zip(left, spares, strict=False))


def best_spare(spares: Iterable[str], ranks: Iterable[int], built_ahead: Mapping[str, Iterable[int]]) -> str:
    """Return the spare for the ranks of a node: the one that has built most of them, or else the first.

    `built_ahead`: by spare, the ranks that are built there. Empty: there is no spare.
    """
    wanted = set(ranks)
    return max(spares, key=lambda spare: len(wanted.intersection(built_ahead.get(spare, ()))), default="")


def charge(facts: Facts, rung: Rung, ranks: Iterable[int]) -> Spent:
    """Return what treating `ranks` by `rung` takes from its budgets."""
    ranks = tuple(sorted(set(ranks)))
    nodes = {facts.nodes[rank] for rank in ranks if rank in facts.nodes}
    return Spent(rung, facts.now, ranks, tuple(sorted(nodes)))


def _worn_nodes(facts: Facts, roles: Roles, policy: NodePolicy, broken: dict[str, str]) -> dict[str, str]:
    """Return the nodes at fault that have failed too often, where another could take their place."""
    at_fault = (*facts.culprits, *facts.mendable)
    replaceable = facts.can_create_nodes or facts.usable_spares()
    if policy.failures is None or not replaceable or not all(map(_leaves_nodes, roles.parties(at_fault))):
        return {}
    failures = failures_by_node(facts.node_failures, policy, facts.now)
    worn = {}
    for node in sorted({facts.nodes[rank] for rank in at_fault if rank in facts.nodes}):
        reason = worn_out(node, failures[node], policy)
        if reason is not None and node not in broken:
            worn[node] = reason
    return worn


def _leaves_nodes(party: Party) -> bool:
    """Return whether a ladder has a rung that replaces a node."""
    return any(party.entry(rung) for rung in (Rung.RECOVER, *WORLD_RESTARTS))


def _unmended(
    facts: Facts, roles: Roles, broken: dict[str, str], worn: dict[str, str], ranks: list[int]
) -> dict[int, str]:
    """Say for each of `ranks`, which could mend themselves, why they may not."""
    unmended = _by_policy(facts, roles, Rung.RETRY_STEP, ranks)
    for rank in ranks:
        node = facts.nodes.get(rank, "")
        reason = broken.get(node) or worn.get(node)
        if reason is not None:
            unmended[rank] = reason
    return unmended


def _misfits(facts: Facts, broken: dict[str, str], culprits: list[int]) -> dict[int, str]:
    misfits = {}
    for rank in culprits:
        node = facts.nodes.get(rank)
        if node is None:
            misfits[rank] = f"the node of rank {rank} is not known"
        elif node in broken:
            misfits[rank] = broken[node]
        elif node in facts.closed:
            misfits[rank] = facts.closed[node]
    return misfits


def _obstacles(facts: Facts, roles: Roles, worn: dict[str, str], ranks: list[int]) -> dict[int, str]:
    """Say for each of `ranks` why the policy does not let it restart in place."""
    obstacles = _by_policy(facts, roles, Rung.RECOVER_IN_PLACE, ranks)
    for rank in ranks:
        if facts.nodes[rank] in worn:
            obstacles[rank] = worn[facts.nodes[rank]]
    return obstacles


def _by_policy(facts: Facts, roles: Roles, rung: Rung, ranks: list[int]) -> dict[int, str]:
    """Say for each of `ranks` why its party's ladder does not allow `rung` for it now."""
    refused: dict[int, str] = {}
    for party, members in roles.divide(ranks):
        entry = party.entry(rung)
        if entry is None:
            refused |= dict.fromkeys(members, party.missing(rung))
        else:
            refused |= _within_budget(facts, entry, party, members)
    return refused


def _within_budget(facts: Facts, entry: RungPolicy, party: Party, ranks: list[int]) -> dict[int, str]:
    account = Account(facts, entry, party.charged)
    everywhere = tried(facts, entry) + account.over(Spent(entry.rung, facts.now))
    if everywhere:
        return dict.fromkeys(ranks, f"{party.prefix}{entry.rung}: {'; '.join(everywhere)}")
    refused = {}
    for rank in ranks:
        over = account.over(charge(facts, entry.rung, (rank,)))
        if over:
            refused[rank] = f"{party.prefix}{entry.rung}: {'; '.join(over)}"
    return refused


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
