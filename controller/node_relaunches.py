"""Which node of a job was replaced by which: found by comparing where its ranks were and are. Pure."""

from collections.abc import Mapping

import msgspec

from ..protocol.incidents import JobStatus


class NodeRelaunch(msgspec.Struct, frozen=True):
    """A node has no rank any more, and other nodes, which had none, have its ranks.

    `state` and `note`: of the node that was left (lost, isolated, spare), and why. `replaced_by`: in the ranks' order.
    """

    node: str
    failure_domain: str
    state: str
    note: str
    ranks: tuple[int, ...]
    replaced_by: tuple[str, ...]


def homes_of(status: JobStatus) -> dict[int, str]:
    """Return the node of each rank that has one."""
    return {rank.rank: rank.node for rank in status.ranks if rank.node}


def relaunches(before: Mapping[int, str], status: JobStatus) -> tuple[NodeRelaunch, ...]:
    """Return the nodes that were replaced since ranks were where `before` says.

    A node that is left without another in its place, as by a job that gets smaller, was not replaced.
    """
    now = homes_of(status)
    left = sorted(set(before.values()) - set(now.values()))
    fresh = set(now.values()) - set(before.values())
    known = {node.node: node for node in status.nodes}
    found = []
    for name in left:
        ranks = tuple(rank for rank, node in sorted(before.items()) if node == name)
        instead = tuple(dict.fromkeys(now[rank] for rank in ranks if now.get(rank) in fresh))
        if instead:
            node = known.get(name)
            domain, state, note = ("", "gone", "") if node is None else (node.failure_domain, node.state, node.note)
            found.append(NodeRelaunch(name, domain, state, note, ranks, instead))
    return tuple(found)
